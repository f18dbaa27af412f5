"""Splits an answer into thinking and reply, by the tags that chat templates use.

Only tags at the start of an answer mark thinking; later ones are ordinary text. A tag may be split
over several pieces of the answer.
"""

from dataclasses import dataclass
from typing import NamedTuple

from llmcli.runtime.text.detokenizer import overlap_length


@dataclass(frozen=True, slots=True)
class ThinkingTags:
    """The tags before and after thinking. Both count as part of the thinking."""

    opening: str
    closing: str


THINKING_TAGS = (
    ThinkingTags(
        "<think>", "</think>"
    ),  # Qwen3, DeepSeek, GLM, SmolLM3, Granite, MiniMax and most others
    ThinkingTags("<thinking>", "</thinking>"),  # Apriel
    ThinkingTags("<seed:think>", "</seed:think>"),  # Seed-OSS
    ThinkingTags("<mm:think>", "</mm:think>"),  # MiniMax-M3
    ThinkingTags("[THINK]", "[/THINK]"),  # Magistral, Ministral
    ThinkingTags("<|START_THINKING|>", "<|END_THINKING|>"),  # Command
    ThinkingTags("<|inner_prefix|>", "<|inner_suffix|>"),  # Apertus
    ThinkingTags("<|channel>thought", "<channel|>"),  # Gemma 4
    ThinkingTags("◁think▷", "◁/think▷"),  # Kimi-VL
    ThinkingTags("<|channel|>analysis<|message|>", "<|channel|>final<|message|>"),  # gpt-oss
)
# tags of gpt-oss between the channels of thinking and reply
HIDDEN_TAGS = ("<|start|>", "<|end|>")


class ThinkingPiece(NamedTuple):
    """A piece of text that belongs either to the thinking or to the reply."""

    is_thinking: bool
    text: str


class ThinkingSplitter:
    """Splits one answer piece by piece. `opened`: the tags of thinking that the prompt has already
    opened.
    """

    def __init__(self, opened: ThinkingTags | None = None) -> None:
        self._inside = opened
        self._begun = opened is not None  # whether it is known if the answer begins with thinking
        self._held = ""

    @property
    def is_replying(self) -> bool:
        """Return whether thinking has ended or is absent, so that all later text belongs to the
        reply.
        """
        return self._begun and self._inside is None

    def feed(self, text: str) -> list[ThinkingPiece]:
        """Return the pieces whose kind is known after this text. Text that may be the start of a
        tag is held back.
        """
        if self.is_replying:
            return [ThinkingPiece(False, text)] if text else []
        text, self._held = self._held + text, ""
        return self._inner(text) if self._begun else self._first(text)

    def finish(self) -> list[ThinkingPiece]:
        """Return the text that was held back, at the end of the answer."""
        text, self._held = self._held, ""
        return [ThinkingPiece(self._inside is not None, text)] if text else []

    def _first(self, text: str) -> list[ThinkingPiece]:
        body = text.lstrip()
        for tags in THINKING_TAGS:
            if body.startswith(tags.opening):
                self._begun, self._inside = True, tags
                return self._inner(text)
            if body.startswith(tags.closing):  # the prompt opened the tag, or the thinking is empty
                self._begun = True
                return _pieces(text, len(text) - len(body) + len(tags.closing))
        if any(
            tag.startswith(body) for tags in THINKING_TAGS for tag in (tags.opening, tags.closing)
        ):
            self._held = text  # also text that is only white space
            return []
        self._begun = True
        return [ThinkingPiece(False, text)]

    def _inner(self, text: str) -> list[ThinkingPiece]:
        assert self._inside
        closes = self._inside.closing
        at = text.find(closes)
        if at >= 0:
            self._inside = None
            return _pieces(text, at + len(closes))
        keep = overlap_length(text, closes)
        self._held = text[len(text) - keep :]
        return _pieces(text, len(text) - keep)[: 1 if len(text) > keep else 0]


def _pieces(text: str, end: int) -> list[ThinkingPiece]:
    return [
        piece
        for piece in (ThinkingPiece(True, text[:end]), ThinkingPiece(False, text[end:]))
        if piece.text
    ]


def split_thinking(text: str) -> tuple[str, str]:
    """Return the thinking, including its tags, and the reply. White space between them is left out."""
    if not any(tag in text for tags in THINKING_TAGS for tag in (tags.opening, tags.closing)):
        return "", text
    splitter = ThinkingSplitter()
    pieces = [*splitter.feed(text), *splitter.finish()]
    thought = "".join(piece.text for piece in pieces if piece.is_thinking)
    said = "".join(piece.text for piece in pieces if not piece.is_thinking)
    return thought, said.lstrip() if thought else said


def find_opened_tags(tail: str) -> ThinkingTags | None:
    """Return the tags whose opening tag is at the end of `tail`, or None. `tail`: the end of a
    prompt.
    """
    body = tail.rstrip()
    return next((tags for tags in THINKING_TAGS if body.endswith(tags.opening)), None)
