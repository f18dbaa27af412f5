"""What is dropped from a full context so that an answer can continue: whole turns, or all but the
first and last tokens.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

# After turns are dropped, 1/4 of the context is free; otherwise every message would drop another
# turn.
FREED_FRACTION = 4


@dataclass(frozen=True, slots=True)
class ShortenedText:
    """A shortened text: its tokens, how many of them are the prompt's, and how many turns are gone
    in total.
    """

    tokens: list[int]
    n_prompt: int
    dropped_turns: int = 0


class OverflowPolicy(Protocol):
    """A policy for a full context.

    `can_move_cells`: remaining cells may be moved up in the cache instead of being recomputed.
    """

    @property
    def can_move_cells(self) -> bool: ...

    def shorten(
        self, tokens: Sequence[int], n_prompt: int, dropped_turns: int, size: int
    ) -> ShortenedText | None:
        """Shorten `tokens` so that one more token fits into `size`. Return None when nothing may be
        dropped.

        `n_prompt`: tokens of the prompt at the start of `tokens`; its first `dropped_turns` turns
        are gone already.
        """
        ...


@dataclass(frozen=True, slots=True)
class DropTurns:
    """Drop the oldest turns, as many as needed to free a part of the context; text before the turns
    stays.

    `prompt_without(n)` returns the prompt without its first `n` turns, of which at most `max_turns`
    may be dropped. It is a function and not a range of tokens because a template may put the system
    text into the first message.
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
    """Keep the first `n_kept` tokens as attention sinks and the last ones; drop half of the rest at
    a time, as llama.cpp does (tools/completion).

    Source: Xiao et al. 2023, StreamingLLM.
    """

    n_kept: int
    can_move_cells: bool = True

    def shorten(
        self, tokens: Sequence[int], n_prompt: int, dropped_turns: int, size: int
    ) -> ShortenedText | None:
        """Drop the tokens after the first `n_kept`, of the prompt and of the answer alike."""
        end = len(tokens) - (size - self.n_kept) // 2
        if end <= self.n_kept or self.n_kept >= size:
            return None
        dropped_prompt = max(0, min(end, n_prompt) - self.n_kept)
        return ShortenedText(
            [*tokens[: self.n_kept], *tokens[end:]], n_prompt - dropped_prompt, dropped_turns
        )
