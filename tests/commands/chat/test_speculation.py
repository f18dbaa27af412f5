"""`run` with --ngram-draft and --model-draft: invalid values, and the reported acceptance."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import gguf
import pytest

from llmcli.errors import UserError
from llmcli.runtime import runner as runner_module
from llmcli.runtime.draft_settings import DraftSettings, require_prediction_layers
from llmcli.runtime.drafting.ngram import PromptLookup
from llmcli.runtime.runner import OpenedParts, Runner
from llmcli.runtime.strategies.base import Speculation
from quant.model_file.read_header import read_header
from tests.fixtures.cli import Done
from tests.fixtures.drafts import CHEAP, Steady
from tests.quant import predicting_checkpoint, tiny_gguf

BENCH_SPEC = ("bench", "spec", "TARGET", "--tasks", "free")


@pytest.mark.parametrize(
    ("words", "message", "hint"),
    [
        (("--ngram-draft", "maybe"), "ngram_draft is 'maybe'", "auto, on, off"),
        (
            ("--ngram-draft", "on", "--samples", "2"),
            "--ngram-draft drafts for one answer",
            "--samples",
        ),
        (("-md", "small.gguf", "--beams", "2"), "--model-draft drafts for one answer", "--beams"),
    ],
)
def test_invalid_draft_flags_are_one_error(
    words: tuple[str, ...],
    message: str,
    hint: str,
    llmcli: Callable[..., Done],
    fake: Callable[..., list[Runner]],
) -> None:
    fake()
    done = llmcli("run", "fake", "hi", *words)
    assert done.code in (1, 2)
    assert message in done.err
    assert hint in done.err
    assert "Traceback" not in done.err


@pytest.mark.parametrize("command", ["run", "chat", "serve", "plan"])
@pytest.mark.parametrize(
    ("method", "words", "other"),
    [
        ("lookahead", ("--ngram-draft", "on"), "--ngram-draft"),
        ("pool", ("--ngram-draft", "on"), "--ngram-draft"),
        ("pool", ("--ngram-draft", "off"), "--ngram-draft off"),
        ("lookahead", ("-md", "small.gguf"), "--model-draft"),
        ("pool", ("-md", "small.gguf"), "--model-draft"),
        ("mtp", ("--ngram-draft", "on"), "--ngram-draft"),
    ],
)
def test_options_that_a_named_method_does_not_use_are_refused(
    method: str, words: tuple[str, ...], other: str, command: str, llmcli: Callable[..., Done]
) -> None:
    done = llmcli(command, "x.gguf", "--draft", method, *words)
    assert done.code == 2
    error, hint = done.err.splitlines()[-2:]
    assert error.endswith(f"--draft {method} does not use {other}")
    assert hint == f"hint: leave out --draft {method} or {other}"


@pytest.mark.parametrize("words", [("run", "-p", "hi"), ("chat",), ("serve",), ("plan",)])
def test_prediction_layers_are_missed_before_the_model_is_rehearsed(
    words: tuple[str, ...],
    llmcli: Callable[..., Done],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No checkpoint has such layers that llama.cpp computes for a Llama."""

    def rehearse_model(*_: object, **__: object) -> None:
        raise AssertionError("rehearsed")

    for module in ("open_model", "rehearsal.rehearse"):
        monkeypatch.setattr(f"llmcli.model_loader.{module}.rehearse_model", rehearse_model)
    model = tiny_gguf.llama(tmp_path / "m.gguf", hidden=64, layers=1)
    done = llmcli(words[0], str(model), *words[1:], "--draft", "mtp", "-c", "64")
    assert done.code == 1
    error, hint = done.err.splitlines()[-2:]
    assert "--draft mtp: llama.cpp computes no layers that predict further tokens" in error
    assert error.endswith("architecture llama")
    assert hint == "hint: leave out --draft mtp, or use --draft ngram"


def test_a_file_that_lost_its_prediction_layers_can_be_made_again(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "qwen35")
    tiny_gguf.vocabulary(writer, 300)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(UserError, match="this file has no layers that predict") as error:
        require_prediction_layers("mtp", read_header(tmp_path / "m.gguf"))
    assert "without --no-mtp" in error.value.hint


def test_ngram_draft_on_means_draft_ngram(llmcli: Callable[..., Done], tmp_path: Path) -> None:
    model = tiny_gguf.llama(tmp_path / "m.gguf", hidden=64, layers=1)
    words = ("run", str(model), "hi", "--raw", "-n", "2", "-c", "64", "--ngram-draft", "on")
    for more, method in (((), "ngram"), (("-md", str(model)), "auto")):
        done = llmcli(*words, *more, "--json")
        assert done.code == 0, done.err
        draft = json.loads(done.out)["draft"]
        assert (draft["method"], draft["ngram"]) == (method, "on")


def test_drafted_and_accepted_tokens_are_reported_when_any_were_drafted(
    llmcli: Callable[..., Done], fake: Callable[..., list[Runner]], monkeypatch: pytest.MonkeyPatch
) -> None:
    without_draft = json.loads(_run(llmcli, fake, monkeypatch, "--json").out)["timing"]
    assert "drafted_tokens" not in without_draft
    monkeypatch.setattr(Runner, "__init__", _init_with_prompt_lookup(Runner.__init__))
    timing = json.loads(_run(llmcli, fake, monkeypatch, "--json").out)["timing"]
    assert timing["drafted_tokens"] >= timing["accepted_tokens"] > 0
    (drafts,) = timing["drafts"]
    assert (drafts["method"], drafts["drafts"]) == ("ngram", drafts["guesses"][0])
    assert (sum(drafts["guesses"]), sum(drafts["right"])) == (
        timing["drafted_tokens"],
        timing["accepted_tokens"],
    )
    expected = (
        f"drafts: ngram {timing['accepted_tokens']} of {timing['drafted_tokens']} right, "
        f"{timing['tokens_per_pass']:.1f} tokens a pass"
    )
    assert timing["tokens_per_pass"] > 1.5
    assert expected in _run(llmcli, fake, monkeypatch).err


def _run(
    llmcli: Callable[..., Done],
    fake: Callable[..., list[Runner]],
    monkeypatch: pytest.MonkeyPatch,
    *words: str,
) -> Done:
    """Answer with a fake model that repeats one sentence, so that prompt lookup finds drafts."""
    text = b"one two three four. one two three four. one two three four. one two three four."
    fake(lambda tokens: text[n] if 0 <= (n := _answer_length(tokens)) < len(text) else 257)
    return llmcli("run", "fake", "hi", "--temp", "0", *words)


def _answer_length(tokens: list[int]) -> int:
    """Return how many tokens of the answer follow the prompt."""
    raw = bytes(token for token in tokens if token < 256)
    return len(raw) - raw.index(b"<assistant>") - len(b"<assistant>")


def _init_with_prompt_lookup(original_init: Callable[..., None]) -> Callable[..., None]:
    """Return a `Runner.__init__` that adds prompt-lookup drafts with constant costs."""

    def init(self: Runner, *args: object, **options: object) -> None:
        original_init(self, *args, **options)
        self.engine.resources = replace(
            self.engine.resources, speculation=Speculation((PromptLookup(),), Steady(CHEAP), 16)
        )

    return init


def _request_drafts(original_init: Callable[..., None], mode: str) -> Callable[..., None]:
    """Return a `Runner.__init__` as if --ngram-draft had the value `mode`, and drafts did not
    pay.
    """

    obstacle = "on this machine a pass over 4 tokens takes 4.0 times as long"

    def init(self: Runner, parts: OpenedParts) -> None:
        original_init(self, replace(parts, drafting=DraftSettings(mode), draft_obstacle=obstacle))

    return init


def test_drafting_that_brings_nothing_is_said_and_in_the_json(
    llmcli: Callable[..., Done], fake: Callable[..., list[Runner]], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain_init = Runner.__init__
    # Drafting was requested, but this machine cannot gain by it.
    monkeypatch.setattr(Runner, "__init__", _request_drafts(plain_init, "on"))
    done = _run(llmcli, fake, monkeypatch)
    assert "speculative decoding is off: on this machine a pass over 4 tokens" in done.err
    assert "nothing drafted" not in done.err
    document = json.loads(_run(llmcli, fake, monkeypatch, "--json").out)
    assert document["timing"]["drafted_tokens"] == document["timing"]["accepted_tokens"] == 0
    assert document["draft"]["ngram"] == "on"
    assert document["draft"]["model"] is None
    assert document["draft"]["obstacle"].startswith("on this machine")
    # Nothing was requested, so nothing is said.
    monkeypatch.setattr(Runner, "__init__", _request_drafts(plain_init, "auto"))
    assert "draft" not in _run(llmcli, fake, monkeypatch).err
    assert "draft" not in json.loads(_run(llmcli, fake, monkeypatch, "--json").out)


def test_a_draft_that_is_never_worth_its_time_is_said(
    llmcli: Callable[..., Done], fake: Callable[..., list[Runner]], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain_init = Runner.__init__

    def init(self: Runner, parts: OpenedParts) -> None:
        drafting = DraftSettings("on")
        speculation = Speculation((PromptLookup(),), Steady(CHEAP), 16)
        plain_init(self, replace(parts, drafting=drafting, speculation=speculation))

    monkeypatch.setattr(Runner, "__init__", init)
    fake(b"nothing repeats")
    assert "because here 4 tokens at once take 1.1 passes" in llmcli("run", "fake", "hi").err
    document = json.loads(llmcli("run", "fake", "hi", "--json").out)
    assert document["timing"]["drafted_tokens"] == 0
    assert document["draft"] == {
        "model": None,
        "ngram": "on",
        "method": "auto",
        "obstacle": None,
    }


@pytest.mark.parametrize("words", [("run", "big:2m", "hi", "-n", "1"), ("plan", "big:2m")])
def test_a_draft_model_of_another_vocabulary_is_refused_with_the_name_of_the_right_one(
    words: tuple[str, ...], llmcli: Callable[..., Done], home: Path, tmp_path: Path
) -> None:
    (home / "config").mkdir(exist_ok=True)
    text = ""
    for name, vocabulary in (("big:2m", 512), ("big:1m", 512), ("other:1m", 300)):
        path = tiny_gguf.llama(
            tmp_path / f"{name.replace(':', '-')}.gguf",
            hidden=64,
            ff=64,
            layers=1,
            vocab=vocabulary,
        )
        draft = 'draft = "big:1m"\n' if name == "big:2m" else ""
        text += f'[models."{name}"]\n{draft}[[models."{name}".sources]]\n'
        text += f'kind = "local"\npath = "{path}"\n'
    (home / "config" / "models.toml").write_text(text)
    for name in ("big:2m", "big:1m", "other:1m"):
        assert llmcli("pull", name).code == 0
    done = llmcli(*words, "-c", "64", "-t", "1", "--trust", "-md", "other:1m")
    assert done.code == 1
    error, hint = done.err.splitlines()[-2:]
    assert "cannot draft for" in error
    assert "its vocabulary is different: it has 300 tokens" in error
    assert hint == "hint: --model-draft big:1m"
    assert "draft model     big:1m" in llmcli("show", "big:2m", "--trust").out
    done = llmcli(*words, "-c", "64", "-t", "1", "--trust", "-md", "big:1m")
    assert done.code == 0, done.err


@pytest.mark.parametrize("words", [("run", "TARGET", "hi"), ("plan", "TARGET"), BENCH_SPEC])
def test_a_draft_model_with_recurrent_state_is_refused_before_anything_is_loaded(
    words: tuple[str, ...],
    llmcli: Callable[..., Done],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target = tiny_gguf.llama(tmp_path / "t.gguf", hidden=64, layers=1)
    draft = tiny_gguf.mamba(tmp_path / "m.gguf")

    def load(path: Path, *_: object, **__: object) -> None:
        raise AssertionError(path)

    monkeypatch.setattr(runner_module, "open_model", load)
    words = tuple(str(target) if word == "TARGET" else word for word in words)
    done = llmcli(*words, "-c", "64", "-md", str(draft))
    assert (done.code, done.out) == (1, "")
    error, hint = done.err.splitlines()[-2:]
    assert "m.gguf cannot draft: a draft model must drop wrong guesses token by token" in error
    assert "the recurrent state of mamba" in error
    assert hint == "hint: name another model with -md, without such layers, or use --draft ngram"


def test_a_hybrid_draft_model_is_refused_with_the_name_of_the_right_one(tmp_path: Path) -> None:
    target = tiny_gguf.llama(tmp_path / "t.gguf", hidden=64, layers=1)
    hybrid = predicting_checkpoint.write_gguf(tmp_path / "h.gguf")
    with pytest.raises(UserError, match="the recurrent state of qwen35") as error:
        DraftSettings(model=hybrid).for_draft_file(read_header(target), "small:1m")
    assert error.value.hint == "use --model-draft small:1m, or --draft ngram"
