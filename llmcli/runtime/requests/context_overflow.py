"""Policies that drop tokens from a full context so that an answer can continue. One drops whole
turns, the other all but the first and the last tokens.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

# After turns are dropped, 1/4 of the context is free. With less, every new message would soon drop
# another turn.
FREED_FRACTION = 4


@dataclass(frozen=True, slots=True)
class ShortenedText:
    """A shortened text: its tokens, how many of them belong to the prompt, and how many turns were
    dropped in total.
    """

    tokens: list[int]
    n_prompt: int
    dropped_turns: int = 0


class OverflowPolicy(Protocol):
    """Decides what to drop from a full context.

    `can_move_cells`: the cells of the remaining tokens may be moved in the cache instead of being
    recomputed.
    """

    @property
    def can_move_cells(self) -> bool: ...

    def shorten(
        self, tokens: Sequence[int], n_prompt: int, dropped_turns: int, size: int
    ) -> ShortenedText | None:
        """Shorten `tokens` so that one more token fits into a context of `size` tokens. Return None
        when nothing may be dropped.

        `n_prompt`: how many tokens at the start of `tokens` belong to the prompt. `dropped_turns`:
        how many turns the prompt has lost already.
        """
        ...


@dataclass(frozen=True, slots=True)
class DropTurns:
    """Drops the oldest turns until a part of the context is free. Text before the first turn stays.

    `prompt_without(n)` returns the prompt without its first `n` turns. At most `max_turns` turns
    may be dropped. The function is needed because a template may put the system text into the first
    message, so a turn is not always a range of tokens.
    """

    max_turns: int
    prompt_without: Callable[[int], Sequence[int]]
    can_move_cells: bool = True

    def shorten(
        self, tokens: Sequence[int], n_prompt: int, dropped_turns: int, size: int
    ) -> ShortenedText | None:
        """Keep the whole answer and drop as many turns as needed to leave room after it."""
        answer = tokens[n_prompt:]

        def fits(gone: int) -> bool:
            return len(self.prompt_without(gone)) + len(answer) <= size - size // FREED_FRACTION

        counts = range(dropped_turns + 1, self.max_turns + 1)
        if not counts:
            return None
        dropped = counts[min(bisect_left(counts, True, key=fits), len(counts) - 1)]
        prompt_left = self.prompt_without(dropped)
        if len(prompt_left) + len(answer) >= size:
            return None
        return ShortenedText([*prompt_left, *answer], len(prompt_left), dropped)


@dataclass(frozen=True, slots=True)
class AttentionSinks:
    """Keeps the first `n_kept` tokens (attention sinks) and the last ones. It drops half of the
    tokens after the first `n_kept` at a time, as llama.cpp does (tools/completion).

    Source: Xiao et al. 2023, StreamingLLM.
    """

    n_kept: int
    can_move_cells: bool = True

    def shorten(
        self, tokens: Sequence[int], n_prompt: int, dropped_turns: int, size: int
    ) -> ShortenedText | None:
        """Drop tokens after the first `n_kept`, whether they belong to the prompt or to the answer."""
        end = len(tokens) - (size - self.n_kept) // 2
        if end <= self.n_kept or self.n_kept >= size:
            return None
        dropped_prompt = max(0, min(end, n_prompt) - self.n_kept)
        return ShortenedText(
            [*tokens[: self.n_kept], *tokens[end:]], n_prompt - dropped_prompt, dropped_turns
        )
