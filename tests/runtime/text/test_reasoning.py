"""Thinking is separated from the reply, however the answer is divided into pieces."""

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

TEXT_ABOUT_TAGS = "A model that writes about <think>tags</think> only writes."


def split(pieces: list[str], inside: ThinkingTags | None = None) -> tuple[str, str]:
    """Return the thinking and the reply of an answer that arrives in pieces."""
    splitter = ThinkingSplitter(inside)
    found = [piece for text in pieces for piece in splitter.feed(text)] + splitter.finish()
    kinds = [piece.is_thinking for piece in found]
    assert kinds == sorted(kinds, reverse=True), "thinking comes first"
    return tuple("".join(p.text for p in found if p.is_thinking is kind) for kind in (True, False))  # type: ignore[return-value]


@pytest.mark.parametrize("tags", THINKING_TAGS, ids=lambda tags: tags.opening)
def test_result_does_not_depend_on_the_pieces(tags: ThinkingTags) -> None:
    thinking, reply = (
        f"\n{tags.opening}Well < [ ◁ </ {tags.closing[:-1]}.{tags.closing}",
        "\n\nFour. " + tags.opening,
    )
    text = thinking + reply
    assert split(list(text)) == (thinking, reply)
    random_numbers = random.Random(7)
    for _ in range(50):
        cuts = sorted(random_numbers.sample(range(1, len(text)), 3))
        assert split([text[a:b] for a, b in zip([0, *cuts], [*cuts, None], strict=True)]) == (
            thinking,
            reply,
        )
    assert split_thinking(text) == (thinking, reply.lstrip())


@pytest.mark.parametrize("tags", THINKING_TAGS, ids=lambda tags: tags.opening)
def test_open_tags_at_the_end_of_a_prompt_are_found(tags: ThinkingTags) -> None:
    assert find_opened_tags(f"<|assistant|>{tags.opening}\n") is tags
    assert find_opened_tags(f"<|assistant|>{tags.opening}\n\n{tags.closing}\n\n") is None
    text = f"Hm.{tags.closing}\nFour."
    assert split(list(text), tags) == (f"Hm.{tags.closing}", "\nFour.")


@pytest.mark.parametrize(
    "text", ["", "  ", "Four.", "<thin ice>", TEXT_ABOUT_TAGS, "<", " [THIN", "</thinly>"]
)
def test_text_without_a_tag_at_its_start_is_the_reply(text: str) -> None:
    assert split(list(text)) == split([text]) == ("", text)
    assert split_thinking(text) == ("", text)


@pytest.mark.parametrize("text", ["<think>never done", "<think>", " <think>almost</think"])
def test_thinking_without_an_end_is_thinking(text: str) -> None:
    assert split(list(text)) == (text, "")
    assert split_thinking(text) == (text, "")


def test_closing_tag_alone_is_empty_thinking() -> None:
    assert split(list("</think>\n\nFour.")) == ("</think>", "\n\nFour.")


def test_pieces_joined_are_the_text() -> None:
    random_numbers = random.Random(3)
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
        text = "".join(
            random_numbers.choice(words)[: random_numbers.randint(1, 40)]
            for _ in range(random_numbers.randint(0, 6))
        )
        assert "".join(split(list(text))) == text


def test_tags_that_are_control_tokens_are_part_of_the_text() -> None:
    """The tags of Magistral are control tokens, for which llama.cpp gives no text by default."""
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

    answer = [258, *b"Hm.", 259, *b"Four.", EOS]
    prompt = (1, 2, 3)
    fake = fake_runner(lambda tokens: answer[len(tokens) - len(prompt)])
    runner = Runner(
        OpenedParts(
            fake.header,
            Tagged(),  # type: ignore[arg-type]
            fake.context,
            fake.options,
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
