"""Reasoning is separated from the answer, in any pieces of a stream."""

import random

import pytest

from llmcli.runtime.requests.request import Request
from llmcli.runtime.runner import OpenedParts, Runner
from llmcli.runtime.sampling import default_sampling
from llmcli.runtime.text.reasoning import (
    THINKING_TAGS,
    ThinkingSplitter,
    ThinkingTags,
    find_opened_tags,
    split_thinking,
)
from tests.fixtures.fakes import EOS, FakeModel, fake_runner

WRITERS = "A model that writes about <think>tags</think> only writes."


def fed(pieces: list[str], inside: ThinkingTags | None = None) -> tuple[str, str]:
    """(thought, said) of a stream in pieces."""
    splitter = ThinkingSplitter(inside)
    found = [piece for text in pieces for piece in splitter.feed(text)] + splitter.finish()
    kinds = [piece.is_thinking for piece in found]
    assert kinds == sorted(kinds, reverse=True), "thinking comes first"
    return tuple("".join(p.text for p in found if p.is_thinking is kind) for kind in (True, False))  # type: ignore[return-value]


@pytest.mark.parametrize("tags", THINKING_TAGS, ids=lambda tags: tags.opening)
def test_every_way_of_cutting_a_stream_gives_the_same(tags: ThinkingTags) -> None:
    thought, said = (
        f"\n{tags.opening}Well < [ ◁ </ {tags.closing[:-1]}.{tags.closing}",
        "\n\nFour. " + tags.opening,
    )
    text = thought + said
    assert fed(list(text)) == (thought, said)
    dice = random.Random(7)
    for _ in range(50):
        cuts = sorted(dice.sample(range(1, len(text)), 3))
        assert fed([text[a:b] for a, b in zip([0, *cuts], [*cuts, None], strict=True)]) == (
            thought,
            said,
        )
    assert split_thinking(text) == (thought, said.lstrip())


@pytest.mark.parametrize("tags", THINKING_TAGS, ids=lambda tags: tags.opening)
def test_a_prompt_that_opens_the_tags_is_seen_and_a_closed_one_is_not(tags: ThinkingTags) -> None:
    assert find_opened_tags(f"<|assistant|>{tags.opening}\n") is tags
    assert find_opened_tags(f"<|assistant|>{tags.opening}\n\n{tags.closing}\n\n") is None
    text = f"Hm.{tags.closing}\nFour."
    assert fed(list(text), tags) == (f"Hm.{tags.closing}", "\nFour.")


@pytest.mark.parametrize(
    "text", ["", "  ", "Four.", "<thin ice>", WRITERS, "<", " [THIN", "</thinly>"]
)
def test_what_does_not_begin_with_a_tag_is_said(text: str) -> None:
    assert fed(list(text)) == fed([text]) == ("", text)
    assert split_thinking(text) == ("", text)


@pytest.mark.parametrize("text", ["<think>never done", "<think>", " <think>almost</think"])
def test_thinking_that_is_cut_off_is_thinking(text: str) -> None:
    assert fed(list(text)) == (text, "")
    assert split_thinking(text) == (text, "")


def test_nothing_thought_is_not_said() -> None:
    assert fed(list("</think>\n\nFour.")) == ("</think>", "\n\nFour.")


def test_nothing_is_lost_or_made_up() -> None:
    dice = random.Random(3)
    words = [tag for tags in THINKING_TAGS for tag in (tags.opening, tags.closing)] + [
        " ",
        "\n",
        "a",
        "<",
        "|",
        "[",
        "◁",
    ]
    for _ in range(500):
        text = "".join(dice.choice(words)[: dice.randint(1, 40)] for _ in range(dice.randint(0, 6)))
        assert "".join(fed(list(text))) == text


def test_tags_that_are_control_tokens_are_text_of_the_answer() -> None:
    """As Magistral's; llama.cpp gives no text for a control token unless asked."""
    names = {258: b"[THINK]", 259: b"[/THINK]"}

    class Tagged(FakeModel):
        def __init__(self) -> None:
            self.shown: set[int] = set()

        def tokenize(self, text: str, *, special: bool, add_special: bool = False) -> list[int]:
            known = {name.decode(): token for token, name in names.items()}
            return (
                [known[text]]
                if special and text in known
                else super().tokenize(text, special=special)
            )

        def piece(self, token: int, *, special: bool = False) -> bytes:
            if token in names:
                return names[token] if special or token in self.shown else b""
            return super().piece(token, special=special)

        def show_as_text(self, token: int) -> None:
            self.shown.add(token)

    said = [258, *b"Hm.", 259, *b"Four.", EOS]
    prompt = (1, 2, 3)
    like = fake_runner(lambda tokens: said[len(tokens) - len(prompt)])
    runner = Runner(
        OpenedParts(
            like.header,
            Tagged(),  # type: ignore[arg-type]
            like.context,
            like.options,
            None,
            1.0,
            native_sampling=False,
        )
    )
    reply = runner.reply(Request(prompt, default_sampling().with_values({"temp": 0})))
    for _ in reply:
        pass
    assert split_thinking(reply.answer.text) == ("[THINK]Hm.[/THINK]", "Four.")
    assert runner.opened_tags((1, 258)) == ThinkingTags("[THINK]", "[/THINK]")
