"""The values of --ngram-draft and --model-draft, and the reported acceptance."""

import json
from collections.abc import Callable
from dataclasses import replace

import pytest

from llmcli.runtime.drafting.ngram import PromptLookup
from llmcli.runtime.runner import Runner
from llmcli.runtime.strategies.base import Speculation
from tests.fixtures.cli import Done
from tests.fixtures.drafts import CHEAP, Steady


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
def test_what_cannot_be_is_one_clear_line(
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


def test_a_line_and_the_json_tell_what_was_guessed_where_something_was(
    llmcli: Callable[..., Done], fake: Callable[..., list[Runner]], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = json.loads(_run(llmcli, fake, monkeypatch, "--json").out)["timing"]
    assert "drafted_tokens" not in plain
    monkeypatch.setattr(Runner, "__init__", _guessing(Runner.__init__))
    timing = json.loads(_run(llmcli, fake, monkeypatch, "--json").out)["timing"]
    assert timing["drafted_tokens"] >= timing["accepted_tokens"] > 0
    assert "drafted tokens accepted" in _run(llmcli, fake, monkeypatch).err


def _run(
    llmcli: Callable[..., Done],
    fake: Callable[..., list[Runner]],
    monkeypatch: pytest.MonkeyPatch,
    *words: str,
) -> Done:
    text = b"one two three four. one two three four. one two three four. one two three four."
    fake(lambda tokens: text[at] if 0 <= (at := _said(tokens)) < len(text) else 257)
    return llmcli("run", "fake", "hi", "--temp", "0", *words)


def _said(tokens: list[int]) -> int:
    """How much of the answer stands behind the prompt's end."""
    raw = bytes(token for token in tokens if token < 256)
    return len(raw) - raw.index(b"<assistant>") - len(b"<assistant>")


def _guessing(made: Callable[..., None]) -> Callable[..., None]:
    """Runners that look up, at prices that do not move."""

    def init(self: Runner, *args: object, **more: object) -> None:
        made(self, *args, **more)
        self.engine.resources = replace(
            self.engine.resources, speculation=Speculation((PromptLookup(),), Steady(CHEAP), 16)
        )

    return init
