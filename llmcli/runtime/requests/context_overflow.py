"""What is dropped from a full context so that an answer can continue: whole turns, or all but the
first and last tokens.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

# After turns are dropped, 1/4 of the context is free; otherwise every message would drop another
# turn.
SPARE = 4


@dataclass(frozen=True, slots=True)
class Shorter:
    """A shortened text: its tokens, how many of them are the prompt's, and how many turns are gone
    in total.
    """

    tokens: list[int]
    prompt: int
    turns: int = 0


class Overflow(Protocol):
    """A policy for a full context.

    `can_move_cells`: remaining cells may be moved up in the cache instead of being recomputed.
    """

    @property
    def move(self) -> bool: ...

    def shorten(self, tokens: Sequence[int], prompt: int, turns: int, size: int) -> Shorter | None:
        """Shorten `tokens` so that one more token fits into `size`. Return None when nothing may be
        dropped.

        `n_prompt`: tokens of the prompt at the start of `tokens`; its first `dropped_turns` turns
        are gone already.
        """
        ...


@dataclass(frozen=True, slots=True)
class Shift:
    """Drop the oldest turns, as many as needed to free a part of the context; text before the turns
    stays.

    `prompt_without(n)` returns the prompt without its first `n` turns, of which at most `max_turns`
    may be dropped. It is a function and not a range of tokens because a template may put the system
    text into the first message.
    """

    turns: int
    without: Callable[[int], Sequence[int]]
    move: bool = True

    def shorten(self, tokens: Sequence[int], prompt: int, turns: int, size: int) -> Shorter | None:
        """Keep the whole answer and drop as many turns as needed to leave room after it."""
        answer = tokens[prompt:]

        def fits(gone: int) -> bool:
            return len(self.without(gone)) + len(answer) <= size - size // SPARE

        counts = range(turns + 1, self.turns + 1)
        if not counts:
            return None
        dropped = counts[min(bisect_left(counts, True, key=fits), len(counts) - 1)]
        prompt_left = self.without(dropped)
        if len(prompt_left) + len(answer) >= size:
            return None
        return Shorter([*prompt_left, *answer], len(prompt_left), dropped)


@dataclass(frozen=True, slots=True)
class Sinks:
    """Keep the first `n_kept` tokens as attention sinks and the last ones; drop half of the rest at
    a time, as llama.cpp does (tools/completion).

    Source: Xiao et al. 2023, StreamingLLM.
    """

    keep: int
    move: bool = True

    def shorten(self, tokens: Sequence[int], prompt: int, turns: int, size: int) -> Shorter | None:
        """Drop the tokens after the first `n_kept`, of the prompt and of the answer alike."""
        end = len(tokens) - (size - self.keep) // 2
        if end <= self.keep or self.keep >= size:
            return None
        dropped_prompt = max(0, min(end, prompt) - self.keep)
        return Shorter([*tokens[: self.keep], *tokens[end:]], prompt - dropped_prompt, turns)
