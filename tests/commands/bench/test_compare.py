"""`llmcli bench compare` on a tiny model with a fake clock, and on saved runs."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from llmcli.bench.compare import interleaved
from tests.fixtures.cli import Done
from tests.quant import tiny_gguf

Llmcli = Callable[..., Done]
QUICK = ("--seconds", "0.1", "-t", "1")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_gguf.llama(
        tmp_path_factory.mktemp("compare") / "tiny.gguf", hidden=64, ff=128, layers=2
    )


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every forward pass take 1 ms, or 2 ms in a context whose micro-batch is 4 tokens, on any
    machine.
    """

    def run_passes(passes: Sequence[Any]) -> list[int]:
        for forward in passes:
            forward()
        milliseconds = 2 if passes and passes[0].func.__self__.n_ubatch == 4 else 1
        return [passes_done * milliseconds * 1_000_000 for passes_done in range(len(passes) + 1)]

    monkeypatch.setattr(interleaved, "run_passes", run_passes)


@pytest.mark.usefixtures("clock")
def test_a_setting_that_halves_the_speed_is_reported_with_its_interval(
    llmcli: Llmcli, model: Path
) -> None:
    words = (
        "bench",
        "compare",
        str(model),
        "--b",
        "-ub 4",
        "-p",
        "8",
        "-n",
        "4",
        "-d",
        "0,8",
        *QUICK,
    )
    document = json.loads(llmcli(*words, "--json").out)
    assert [row["test"] for row in document["tests"]] == ["pp8", "tg4", "pp8 @ d8", "tg4 @ d8"]
    assert (document["interleaved"], document["b"]["settings"]) == (True, "-ub 4")
    for row in document["tests"]:
        assert row["differs"] and row["ratio"] == pytest.approx(0.5)
        assert row["low"] < 0.5 < row["high"]
        assert row["confidence"] == pytest.approx(1 - 0.01 / 4)
        assert row["pairs"] == len(row["a_samples_ts"]) == len(row["b_samples_ts"]) >= 12
        assert (row["a_median_ts"], row["verdict"][:21]) == (
            2 * row["b_median_ts"],
            "B is 0.500x as fast a",
        )


@pytest.mark.usefixtures("clock")
def test_a_model_does_not_differ_from_itself_in_the_printed_table(
    llmcli: Llmcli, model: Path
) -> None:
    done = llmcli("bench", "compare", str(model), str(model), "-p", "0", "-n", "4", *QUICK)
    assert done.code == 0
    for text in (
        "tiny.gguf\n",
        "tg4: no significant difference: ratio 1.000",
        "B / A",
        "probability of 0.99",
    ):
        assert text in done.out
    assert "noisy" not in done.err


@pytest.mark.parametrize("apart_flag", [(), ("--apart",)])
def test_two_models_are_compared_interleaved_and_one_after_the_other(
    llmcli: Llmcli, model: Path, tmp_path: Path, apart_flag: tuple[str, ...]
) -> None:
    second_model = tiny_gguf.llama(tmp_path / "other.gguf", hidden=64, ff=128, layers=1)
    done = llmcli(
        "bench",
        "compare",
        str(model),
        str(second_model),
        "-p",
        "8",
        "-n",
        "4",
        *QUICK,
        *apart_flag,
        "--json",
    )
    document = json.loads(done.out)
    assert [Path(document[side]["path"]).name for side in "ab"] == ["tiny.gguf", "other.gguf"]
    for row in document["tests"]:
        assert row["low"] <= row["ratio"] <= row["high"]
        assert row["differs"] == (not row["low"] <= 1 <= row["high"])


def test_saved_runs_need_no_model(llmcli: Llmcli, model: Path, tmp_path: Path) -> None:
    files = []
    for number in range(2):
        rows = json.loads(
            llmcli(
                "bench", str(model), "-p", "8", "-n", "4", "-r", "3", "-t", "1", "-o", "json"
            ).out
        )
        for row in rows:
            row["samples_ts"], row["n_threads"] = (
                [[100.0, 101.0, 99.0], [300.0, 303.0, 297.0]][number],
                1 + number,
            )
        files.append(tmp_path / f"{number}.json")
        files[-1].write_text(json.dumps(rows))
    done = llmcli("bench", "compare", *map(str, files), "--json")
    document = json.loads(done.out)
    assert not document["interleaved"] and "not interleaved" in done.err
    for row in document["tests"]:
        assert row["differs"] and row["ratio"] == pytest.approx(3)
        assert ["n_threads", 1, 2] in row["differing"] and row["pairs"] is None
    done = llmcli("bench", "compare", *map(str, files))
    assert (
        "n_threads: 1 in A, 2 in B" in done.out
        and "tg4: B is 3.0" in done.out
        and "noisy" not in done.err
    )
    for row in rows:
        row["samples_ts"] = [300.0, 100.0, 50.0]
    files[1].write_text(json.dumps(rows))
    done = llmcli("bench", "compare", *map(str, files))
    assert "tg4: noisy machine: B alone ran at 60 to 260 tok/s" in done.err
    assert "no significant difference" in done.out
    rows[0]["cpu_info"] = rows[1]["cpu_info"] = "another \x1b[31mcpu"
    files[1].write_text(json.dumps(rows))
    done = llmcli("bench", "compare", *map(str, files))
    assert (done.code, "different machines" in done.err, "\x1b" in done.err) == (1, True, False)
    assert "--anyway" in done.err
    assert llmcli("bench", "compare", *map(str, files), "--anyway").code == 0


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["x.gguf", "--a", "-q 1"], 2, "unknown option '-q'"),
        (["x.gguf", "--b", "-t"], 2, "-t has no value"),
        (["x.gguf", "--b", "-t '1"], 2, "has an unclosed quote"),
        (["x.gguf", "--b", "-t 1,2"], 1, "several values"),
        (["x.gguf", "--b", "-t 0"], 1, "-t is 0"),
        (["x.gguf", "--b=-ctk q9"], 1, "-ctk: unknown value 'q9'"),
        (["x.gguf", "--b", "-ngl x"], 1, "-ngl: invalid value"),
        (["x.gguf", "-p", "0", "-n", "0"], 1, "no test to run"),
        (["x.gguf", "--seconds", "0"], 2, "--seconds"),
        (["x.gguf"], 1, "x.gguf"),
        (["1", "2"], 1, "no run 1"),
        (["x.json", "x.json"], 1, "cannot read x.json"),
    ],
)
def test_invalid_arguments_are_an_error_without_output(
    llmcli: Llmcli, words: list[str], code: int, message: str
) -> None:
    done = llmcli("bench", "compare", *words)
    assert (done.code, done.out) == (code, "")
    assert message in done.err


def test_saved_runs_refuse_a_model_and_the_flags_of_a_measurement(
    llmcli: Llmcli, tmp_path: Path
) -> None:
    file = tmp_path / "a.json"
    file.write_text(json.dumps([{"n_prompt": 0, "n_gen": 4, "samples_ts": [1.0, 1.1]}]))
    for words, message in (
        ((str(file), "m"), "but m is not"),
        ((str(file),), "but nothing is not"),
        ((str(file), str(file), "--a", "-t 1"), "cannot be measured again"),
        ((str(file), str(file), "--seconds", "3"), "cannot be measured again"),
        ((str(file), str(file), "--precision", "3"), "cannot be measured again"),
        ((str(file), str(file), "--apart"), "cannot be measured again"),
        (("x.gguf", "--anyway"), "applies to saved runs"),
    ):
        done = llmcli("bench", "compare", *words)
        assert (done.code, done.out) == (2, "")
        assert message in done.err
