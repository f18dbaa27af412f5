"""`run` with --ngram-draft and --model-draft: invalid values, and the reported acceptance."""

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


def test_drafted_and_accepted_tokens_are_reported_when_any_were_drafted(
    llmcli: Callable[..., Done], fake: Callable[..., list[Runner]], monkeypatch: pytest.MonkeyPatch
) -> None:
    without_draft = json.loads(_run(llmcli, fake, monkeypatch, "--json").out)["timing"]
    assert "drafted_tokens" not in without_draft
    monkeypatch.setattr(Runner, "__init__", _init_with_prompt_lookup(Runner.__init__))
    timing = json.loads(_run(llmcli, fake, monkeypatch, "--json").out)["timing"]
    assert timing["drafted_tokens"] >= timing["accepted_tokens"] > 0
    assert "drafted tokens accepted" in _run(llmcli, fake, monkeypatch).err


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
