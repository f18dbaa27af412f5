"""Splits an answer into thinking and reply, by the tags that templates use.

Thinking is at the start of an answer; later tags are ordinary text. Tags may be split over any
number of pieces.
"""

from dataclasses import dataclass
from typing import NamedTuple

from llmcli.runtime.text.detokenizer import overlap


@dataclass(frozen=True, slots=True)
class Tags:
    """The tags around thinking; both belong to it."""

    opens: str
    closes: str


TAGS = (
    Tags("<think>", "</think>"),  # Qwen3, DeepSeek, GLM, SmolLM3, Granite, MiniMax and most others
    Tags("<thinking>", "</thinking>"),  # Apriel
    Tags("<seed:think>", "</seed:think>"),  # Seed-OSS
    Tags("<mm:think>", "</mm:think>"),  # MiniMax-M3
    Tags("[THINK]", "[/THINK]"),  # Magistral, Ministral
    Tags("<|START_THINKING|>", "<|END_THINKING|>"),  # Command
    Tags("<|inner_prefix|>", "<|inner_suffix|>"),  # Apertus
    Tags("<|channel>thought", "<channel|>"),  # Gemma 4
    Tags("◁think▷", "◁/think▷"),  # Kimi-VL
    Tags("<|channel|>analysis<|message|>", "<|channel|>final<|message|>"),  # gpt-oss
)
# between the two channels of gpt-oss
HIDDEN = ("<|start|>", "<|end|>")


class Piece(NamedTuple):
    """Text that is thinking or reply."""

    thinking: bool
    text: str


class Splitter:
    """Splits one answer piece by piece. `opened`: tags that the prompt has opened already."""

    def __init__(self, opened: Tags | None = None) -> None:
        self._inside = opened
        self._begun = opened is not None  # whether the answer's first text has been classified
        self._held = ""

    @property
    def talking(self) -> bool:
        """Return whether thinking is over or absent, so that all following text is the reply."""
        return self._begun and self._inside is None

    def feed(self, text: str) -> list[Piece]:
        """Return the pieces that are certain after this text; text that may start a tag is held
        back.
        """
        if self.talking:
            return [Piece(False, text)] if text else []
        text, self._held = self._held + text, ""
        return self._inner(text) if self._begun else self._first(text)

    def finish(self) -> list[Piece]:
        """Return the text held back, at the end of the answer."""
        text, self._held = self._held, ""
        return [Piece(self._inside is not None, text)] if text else []

    def _first(self, text: str) -> list[Piece]:
        body = text.lstrip()
        for tags in TAGS:
            if body.startswith(tags.opens):
                self._begun, self._inside = True, tags
                return self._inner(text)
            if body.startswith(tags.closes):  # empty thinking
                self._begun = True
                return _pieces(text, len(text) - len(body) + len(tags.closes))
        if any(tag.startswith(body) for tags in TAGS for tag in (tags.opens, tags.closes)):
            self._held = text  # also while there is only white space
            return []
        self._begun = True
        return [Piece(False, text)]

    def _inner(self, text: str) -> list[Piece]:
        assert self._inside
        closes = self._inside.closes
        at = text.find(closes)
        if at >= 0:
            self._inside = None
            return _pieces(text, at + len(closes))
        keep = overlap(text, closes)
        self._held = text[len(text) - keep :]
        return _pieces(text, len(text) - keep)[: 1 if len(text) > keep else 0]


def _pieces(text: str, end: int) -> list[Piece]:
    return [piece for piece in (Piece(True, text[:end]), Piece(False, text[end:])) if piece.text]


def split(text: str) -> tuple[str, str]:
    """Return the thinking with its tags, and the reply without the blank lines between them."""
    if not any(tag in text for tags in TAGS for tag in (tags.opens, tags.closes)):
        return "", text
    splitter = Splitter()
    pieces = [*splitter.feed(text), *splitter.finish()]
    thought = "".join(piece.text for piece in pieces if piece.thinking)
    said = "".join(piece.text for piece in pieces if not piece.thinking)
    return thought, said.lstrip() if thought else said


def opened(tail: str) -> Tags | None:
    """Return the tags that a prompt ending with `tail` has opened, or None."""
    body = tail.rstrip()
    return next((tags for tags in TAGS if body.endswith(tags.opens)), None)
