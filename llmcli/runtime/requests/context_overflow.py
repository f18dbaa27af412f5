"""Policies for a full context. They decide which tokens to drop so that an answer can continue: the
oldest turns of a conversation (DropTurns), or all but the first and the last tokens
(AttentionSinks).
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

# After turns are dropped, at least 1/4 of the context is free. If less were freed, almost every new
# message would drop turns again.
FREED_FRACTION = 4
# Number of attention sinks: tokens that stay in addition to those before the first message. More
# than 4 do not improve the text (Xiao et al. 2023, StreamingLLM).
SINK_TOKENS = 4


@dataclass(frozen=True, slots=True)
class ShortenedText:
    """The result of an overflow policy. `tokens`: the remaining tokens. `n_prompt`: how many of
    them belong to the prompt. `dropped_turns`: how many turns were dropped so far, including
    earlier calls.
    """

    tokens: list[int]
    n_prompt: int
    dropped_turns: int = 0


class OverflowPolicy(Protocol):
    """Decides which tokens to drop from a full context.

    `can_move_cells`: whether the cells of the remaining tokens may be moved in the cache instead of
    being recomputed.
    """

    @property
    def can_move_cells(self) -> bool: ...

    def shorten(
        self, tokens: Sequence[int], n_prompt: int, dropped_turns: int, size: int
    ) -> ShortenedText | None:
        """Shorten a text so that at least one more token fits into a context of `size` tokens.
        Return None when nothing may be dropped.

        `tokens`: prompt and answer. `n_prompt`: how many of them belong to the prompt.
        `dropped_turns`: how many turns were already dropped from the prompt.
        """
        ...


@dataclass(frozen=True, slots=True)
class DropTurns:
    """Drops the oldest turns of a conversation until 1 / FREED_FRACTION of the context is free.
    Text before the first turn is not dropped.

    `prompt_without(n)` returns the tokens of the prompt without its first `n` turns. This is a
    function because a template may put the system text into the first message, so a turn is not
    always a range of tokens. At most `max_turns` turns may be dropped.
    """

    max_turns: int
    prompt_without: Callable[[int], Sequence[int]]
    can_move_cells: bool = True

    def shorten(
        self, tokens: Sequence[int], n_prompt: int, dropped_turns: int, size: int
    ) -> ShortenedText | None:
        """Drop as many turns as needed, and keep the whole answer. Return None when even without
        `max_turns` turns no token more would fit.
        """
        answer = tokens[n_prompt:]

        def fits(n_dropped: int) -> bool:
            """Return whether enough of the context is free after `n_dropped` turns are dropped."""
            length = len(self.prompt_without(n_dropped)) + len(answer)
            return length <= size - size // FREED_FRACTION

        counts = range(dropped_turns + 1, self.max_turns + 1)
        if not counts:
            return None
        dropped = counts[min(bisect_left(counts, True, key=fits), len(counts) - 1)]
        prompt = self.prompt_without(dropped)
        if len(prompt) + len(answer) >= size:
            return None
        return ShortenedText([*prompt, *answer], len(prompt), dropped)


@dataclass(frozen=True, slots=True)
class AttentionSinks:
    """Keeps the first `n_kept` tokens, the attention sinks, and the last tokens of a text. Each
    time, it drops the older half of the tokens in between, as llama.cpp does (tools/completion).

    Source: Xiao et al. 2023, StreamingLLM.
    """

    n_kept: int
    can_move_cells: bool = True

    def shorten(
        self, tokens: Sequence[int], n_prompt: int, dropped_turns: int, size: int
    ) -> ShortenedText | None:
        """Drop tokens after the first `n_kept`. They may belong to the prompt or to the answer."""
        end = len(tokens) - (size - self.n_kept) // 2
        if end <= self.n_kept or self.n_kept >= size:
            return None
        dropped_prompt = max(0, min(end, n_prompt) - self.n_kept)
        return ShortenedText(
            [*tokens[: self.n_kept], *tokens[end:]], n_prompt - dropped_prompt, dropped_turns
        )
