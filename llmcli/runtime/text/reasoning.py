"""Split an answer into thinking and reply at the tags that models write, such as <think>.

Only a tag at the start of an answer opens thinking; tags after the reply has begun are ordinary
text. An answer arrives in pieces, and a tag may extend over several pieces.
"""

from dataclasses import dataclass
from typing import NamedTuple

from llmcli.runtime.text.detokenizer import overlap_length


@dataclass(frozen=True, slots=True)
class ThinkingTags:
    """The tags that a model writes before and after its thinking. Both tags count as thinking."""

    opening: str
    closing: str


THINKING_TAGS = (
    # Qwen3, DeepSeek, GLM, SmolLM3, Granite, MiniMax and most others
    ThinkingTags("<think>", "</think>"),
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
# Tags that gpt-oss writes between the thinking and the reply, before the closing tag.
CHANNEL_TAGS = ("<|start|>", "<|end|>")


class ThinkingPiece(NamedTuple):
    """A piece of an answer's text, and whether it is thinking or reply."""

    is_thinking: bool
    text: str


class ThinkingSplitter:
    """Splits one answer into thinking and reply while its text arrives in pieces."""

    def __init__(self, opened: ThinkingTags | None = None) -> None:
        """`opened`: the tags whose opening tag the prompt ends with, or None. Such an answer starts
        inside the thinking.
        """
        self._open_tags = opened  # the tags of the present thinking; None outside of thinking
        # whether enough text has arrived to know if the answer starts with thinking
        self._is_start_known = opened is not None
        self._held_text = ""  # text that may be the first part of a tag

    @property
    def is_replying(self) -> bool:
        """Return whether all further text belongs to the reply, because the thinking has ended or
        the answer has none.
        """
        return self._is_start_known and self._open_tags is None

    def feed(self, text: str) -> list[ThinkingPiece]:
        """Add the next text of the answer. Return the pieces of which it is now known whether they
        are thinking or reply. Text that may be the start of a tag is held back.
        """
        if self.is_replying:
            return [ThinkingPiece(False, text)] if text else []
        text, self._held_text = self._held_text + text, ""
        return self._split_at_closing(text) if self._is_start_known else self._detect_opening(text)

    def finish(self) -> list[ThinkingPiece]:
        """Return the text that was held back. Called at the end of the answer."""
        text, self._held_text = self._held_text, ""
        return [ThinkingPiece(self._open_tags is not None, text)] if text else []

    def _detect_opening(self, text: str) -> list[ThinkingPiece]:
        """Decide whether the answer starts with thinking. Return the pieces of `text`, all text so
        far, or an empty list while this is not known.
        """
        body = text.lstrip()
        for tags in THINKING_TAGS:
            if body.startswith(tags.opening):
                self._is_start_known, self._open_tags = True, tags
                return self._split_at_closing(text)
            if body.startswith(tags.closing):  # the prompt opened the tag, or the thinking is empty
                self._is_start_known = True
                return _pieces(text, len(text) - len(body) + len(tags.closing))
        if any(
            tag.startswith(body) for tags in THINKING_TAGS for tag in (tags.opening, tags.closing)
        ):
            self._held_text = text  # this includes text of only white space
            return []
        self._is_start_known = True
        return [ThinkingPiece(False, text)]

    def _split_at_closing(self, text: str) -> list[ThinkingPiece]:
        """Return the pieces of a text that starts inside the thinking. A possible start of the
        closing tag is held back.
        """
        assert self._open_tags
        closing = self._open_tags.closing
        position = text.find(closing)
        if position >= 0:
            self._open_tags = None
            return _pieces(text, position + len(closing))
        n_held = overlap_length(text, closing)
        self._held_text = text[len(text) - n_held :]
        return _pieces(text, len(text) - n_held)[: 1 if len(text) > n_held else 0]


def _pieces(text: str, end: int) -> list[ThinkingPiece]:
    """Return `text[:end]` as thinking and the text after it as reply. Empty pieces are left out."""
    return [
        piece
        for piece in (ThinkingPiece(True, text[:end]), ThinkingPiece(False, text[end:]))
        if piece.text
    ]


def split_thinking(text: str) -> tuple[str, str]:
    """Return the thinking of a complete answer, including its tags, and the reply. White space
    between the two is left out.
    """
    if not any(tag in text for tags in THINKING_TAGS for tag in (tags.opening, tags.closing)):
        return "", text
    splitter = ThinkingSplitter()
    pieces = [*splitter.feed(text), *splitter.finish()]
    thinking = "".join(piece.text for piece in pieces if piece.is_thinking)
    reply = "".join(piece.text for piece in pieces if not piece.is_thinking)
    return thinking, reply.lstrip() if thinking else reply


def find_opened_tags(tail: str) -> ThinkingTags | None:
    """Return the tags whose opening tag ends `tail`, the last characters of a prompt. Return None
    when there are none. White space at the end is ignored.
    """
    body = tail.rstrip()
    return next((tags for tags in THINKING_TAGS if body.endswith(tags.opening)), None)
