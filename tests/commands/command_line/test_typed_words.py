"""Misspelled options, subcommands and arguments too many: one line, and the nearest name."""

from collections.abc import Callable

import pytest

from llmcli.commands.command_line.typed_words import nearest_names
from tests.fixtures.cli import Done

Llmcli = Callable[..., Done]


@pytest.mark.parametrize(
    ("line", "error", "hint"),
    [
        ("run m hi --temprature 1", "no such option: --temprature", "did you mean --temp?"),
        ("run m hi --temperature=1", "no such option: --temperature", "did you mean --temp?"),
        ("run m hi --max-tokens 9", "no such option: --max-tokens", "did you mean --predict?"),
        ("run m hi -sk row", "no such option: -sk", "did you mean"),
        ("run m hi -ngll 3", "no such option: -ngll", "did you mean -ngl?"),
        ("run m -1", "no such option: -1", "write -- before an argument"),
        ("run m hi --xyzzy", "no such option: --xyzzy", "`llmcli run --help` lists the options"),
        ("run m hi -c", "-c needs a value", "`llmcli run --help`"),
        ("run m why is it", "too many arguments: is it", "llmcli run m 'why is it'"),
        ("list a b", "too many arguments: a b", "llmcli list takes no arguments"),
        ("plan a b", "too many arguments: b", "llmcli plan takes REF"),
        ("list --jsn", "no such option: --jsn", "did you mean --json?"),
        ("bench --threds 2", "no such option: --threds", "did you mean --threads?"),
        ("bench rooflin m", "no such command: rooflin", "did you mean `llmcli bench roofline`?"),
        ("bench tun", "no such command: tun", "did you mean `llmcli bench tune`?"),
        ("sessions shw", "no such command: shw", "did you mean `llmcli sessions show`?"),
        ("export vlm", "no such command: vlm", "did you mean `llmcli export vllm`?"),
        ("quantise x", "no such command: quantise", "did you mean `llmcli quantize`?"),
        ("xyzzy", "no such command: xyzzy", "`llmcli --help` lists the commands"),
        ("pull", "missing argument 'REF'", "`llmcli pull --help`"),
        ("serve m --port 99999", "invalid value for '--port'", "`llmcli serve --help`"),
        ("serve m --port x", "invalid value for '--port'", "`llmcli serve --help`"),
    ],
)
def test_wrong_words_get_one_line_and_what_to_type(
    line: str, error: str, hint: str, llmcli: Llmcli
) -> None:
    done = llmcli(*line.split())
    first, second = done.err.splitlines()
    assert (done.code, done.out) == (2, "")
    assert first.startswith(f"error: {error}")
    assert second.startswith("hint: ")
    assert hint in second


@pytest.mark.parametrize(
    "words",
    [
        ("fake", "hi", "-n3"),
        ("fake", "hi", "--predict=3"),
        ("fake", "-n", "3", "--", "-hi"),
        ("fake", "-p", "-sm row"),
        ("fake", "hi", "-n", "-1"),
        ("fake", "hi", "-s7"),
        ("fake", "-f-"),
        ("fake", "hi", "--fit", "-n", "3"),
        ("fake", "hi", "-l15+1"),
    ],
)
def test_right_words_are_taken(
    words: tuple[str, ...], llmcli: Llmcli, fake: Callable[..., object]
) -> None:
    fake(b"yes")
    done = llmcli("run", *words, stdin=b"from stdin")
    assert (done.code, done.out[:1]) == (0, "y")


def test_a_model_that_is_called_like_a_bench_is_measured(
    llmcli: Llmcli, tmp_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(str(tmp_path))
    assert "no such command" in llmcli("bench", "loads").err
    (tmp_path / "loads").mkdir()  # type: ignore[operator]
    assert "no such command" not in llmcli("bench", "loads").err


def test_nearest_names_prefer_a_common_beginning() -> None:
    names = ["--temp", "--chat-template", "--dynatemp-range", "--top-p"]
    assert nearest_names("--temprature", names) == ["--temp"]
    assert nearest_names("--dynatemp", names) == ["--dynatemp-range"]
    assert nearest_names("zzz", names) == []
