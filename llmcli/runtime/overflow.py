"""What leaves when the context is full, so that an answer can go on: whole turns, or all but the
first and last tokens.

Knows tokens alone: where a conversation has turns is told by whoever asks.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

# Of the context that is free after turns have left: else every message would let one leave.
SPARE = 4


@dataclass(frozen=True, slots=True)
class Shorter:
    """What stays: its tokens, of which the first `prompt` are the prompt's, and how many turns have
    left in all.
    """

    tokens: list[int]
    prompt: int
    turns: int = 0


class Overflow(Protocol):
    """A policy for a full context. `move`: what stays may move up in the cache instead of being
    computed anew.
    """

    @property
    def move(self) -> bool: ...

    def shorten(self, tokens: Sequence[int], prompt: int, turns: int, size: int) -> Shorter | None:
        """What stays of `tokens`, whose first `prompt` are the prompt without its first `turns`, so
        that one more fits into `size`; None where nothing may leave.
        """
        ...


@dataclass(frozen=True, slots=True)
class Shift:
    """The oldest turns leave, as many as it takes for a part of the context to be free; what stands
    before them stays.

    `without` gives the prompt without its first turns, of which it has `turns` that may leave. (Not
    a range of its tokens: a template may put the system text into the first message.)
    """

    turns: int
    without: Callable[[int], Sequence[int]]
    move: bool = True

    def shorten(self, tokens: Sequence[int], prompt: int, turns: int, size: int) -> Shorter | None:
        """All of the answer stays, and of the turns as many as leave room behind it."""
        answered = tokens[prompt:]

        def fits(gone: int) -> bool:
            return len(self.without(gone)) + len(answered) <= size - size // SPARE

        choices = range(turns + 1, self.turns + 1)
        if not choices:
            return None
        gone = choices[min(bisect_left(choices, True, key=fits), len(choices) - 1)]
        stays = self.without(gone)
        if len(stays) + len(answered) >= size:
            return None
        return Shorter([*stays, *answered], len(stays), gone)


@dataclass(frozen=True, slots=True)
class Sinks:
    """The first `keep` tokens stay, to which models attend whatever they say (Xiao et al. 2023,
    StreamingLLM), and the last ones; half of the room between is given up at a time, as llama.cpp
    does it (tools/completion).
    """

    keep: int
    move: bool = True

    def shorten(self, tokens: Sequence[int], prompt: int, turns: int, size: int) -> Shorter | None:
        """Prompt and answer alike: what is old leaves."""
        end = len(tokens) - (size - self.keep) // 2
        if end <= self.keep or self.keep >= size:
            return None
        left = max(0, min(end, prompt) - self.keep)
        return Shorter([*tokens[: self.keep], *tokens[end:]], prompt - left, turns)
