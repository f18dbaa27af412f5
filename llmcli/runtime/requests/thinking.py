"""Follows the thinking of one answer while it is generated: counts its tokens, and decides when a
budget or the user ends it.
"""

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass

from llmcli.runtime.text.detokenizer import overlap_length
from llmcli.runtime.text.reasoning import THINKING_TAGS, ThinkingTags

# Returns the tokens that end thinking in these tags. The second argument is the number of bytes of
# the closing tag that the answer already has, the third whether the thinking ends with a line end,
# the fourth whether the white space after the tag is left out.
ClosingTokens = Callable[[ThinkingTags, int, bool, bool], tuple[int, ...]]


@dataclass(frozen=True, slots=True, eq=False)
class ThinkingLimit:
    """How long an answer may think, and how its thinking is ended.

    - `closing_tokens`: the model's way to end thinking.
    - `opened`: the thinking tags whose opening tag ends the prompt, or None.
    - `budget`: the largest number of tokens between the tags; None: any number.
    """

    closing_tokens: ClosingTokens
    opened: ThinkingTags | None = None
    budget: int | None = None


class ThinkingTracker:
    """The state of the thinking in one answer. A token is inside the thinking if any of its bytes
    are after the opening tag and before the closing tag.

    - `n_tokens`: the tokens of the answer so far.
    - `n_inside`: those inside the thinking; a token that may be a part of the closing tag counts
      until the thinking ends.
    - `answer_start`: the number of tokens before the first one of the reply, without the white space
      after the thinking; None as long as there is no reply.
    - `is_open`: the answer is inside its thinking.
    - `must_end`: the thinking ends with the next token. Any thread may set it.
    """

    def __init__(self, limit: ThinkingLimit) -> None:
        self.limit = limit
        self.n_tokens = self.n_inside = 0
        self.answer_start: int | None = None
        self.must_end = self.was_closed = False
        self._tags = limit.opened
        self.is_open = limit.opened is not None
        self._is_known = self.is_open  # whether it is known if the answer begins with thinking
        self._text = b""  # what may belong to a tag: the answer's first or last bytes
        self._is_line_start = True  # whether the thinking is empty or ends with a line end
        self._starts: list[int] = []  # position of each token's first byte in the thinking
        self._length = 0  # bytes since the opening tag
        self._had_thinking = self.is_open
        self._is_counted = False  # whether the tokens that follow end the thinking

    @property
    def is_due(self) -> bool:
        """Return whether the thinking is to be ended now."""
        if not self.is_open:
            return False
        budget = self.limit.budget
        return self.must_end or (budget is not None and self.n_inside >= budget)

    @property
    def may_think(self) -> bool:
        """Return whether the answer is inside its thinking, or may still begin with one."""
        return self.is_open or not self._is_known

    @property
    def is_bounded(self) -> bool:
        """Return whether the answer is inside thinking that has a budget, so that a reply follows
        in any case.
        """
        return self.is_open and self.limit.budget is not None

    @property
    def lacks_reply(self) -> bool:
        """Return whether the thinking was ended by force and no text of the reply follows yet."""
        return self.was_closed and self.answer_start is None

    def closing_tokens(self, is_constrained: bool) -> tuple[int, ...]:
        """Return the tokens that end the thinking now, and remember that it was ended by force.
        `is_constrained`: a grammar decides what follows the closing tag.
        """
        assert self._tags
        self.was_closed = True
        n_written = overlap_length(self._text, self._tags.closing.encode())
        self._count_inside(self._length - n_written)
        return self.limit.closing_tokens(self._tags, n_written, self._is_line_start, is_constrained)

    def feed(self, piece: bytes) -> None:
        """Add the bytes of the answer's next token."""
        number = self.n_tokens
        self.n_tokens += 1
        if self.answer_start is not None:
            return
        if self.is_open:
            self._starts.append(self._length)
            self._read_inside(piece, number)
        elif self._is_known:
            self._read_reply(piece, number)
        else:
            self._read_start(piece, number)

    def _read_start(self, piece: bytes, number: int) -> None:
        """Decide whether the answer begins with thinking, as ThinkingSplitter does."""
        self._text += piece
        body = self._text.lstrip()
        for tags in THINKING_TAGS:
            opening, closing = tags.opening.encode(), tags.closing.encode()
            if body.startswith(opening):
                self._is_known = self.is_open = self._had_thinking = True
                self._tags, self._text = tags, b""
                rest = body[len(opening) :]
                if rest:
                    self._starts.append(0)
                    self._read_inside(rest, number)
                return
            if body.startswith(closing):
                self._is_known = self._had_thinking = True
                self._read_reply(body[len(closing) :], number)
                return
        if any(
            tag.encode().startswith(body)
            for tags in THINKING_TAGS
            for tag in (tags.opening, tags.closing)
        ):
            return
        self._is_known, self.answer_start = True, 0

    def _read_inside(self, piece: bytes, number: int) -> None:
        """Add bytes inside the thinking, in which the closing tag may end."""
        assert self._tags
        closing = self._tags.closing.encode()
        before = self._text[-(len(closing) - 1) :] if self._text else b""
        text = before + piece
        position = text.find(closing)
        self._length += len(piece)
        if position < 0:
            self._text = text
            self._count_inside(self._length)
            self._is_line_start = text.endswith(b"\n")
            return
        self._count_inside(self._length - len(text) + position)
        self.is_open = False
        self._starts.clear()
        self._read_reply(text[position + len(closing) :], number)

    def _count_inside(self, end: int) -> None:
        """Set the number of tokens inside the thinking, which ends at the position `end` for now.
        Tokens that end it by force are not counted.
        """
        if not self._is_counted:
            count = bisect_right(self._starts, end)
            # the last token that starts there is the closing tag's first one
            if end < self._length and count and self._starts[count - 1] == end:
                count -= 1
            self.n_inside = count
            self._is_counted = self.was_closed

    def _read_reply(self, piece: bytes, number: int) -> None:
        """Add bytes after the thinking."""
        if piece.strip() or not self._had_thinking:
            self.answer_start = number
