"""Drawing one token from one row of logits, for one sequence.

The numpy chain is the truth. Where every step has a native form the same chain runs inside
llama.cpp (tested equal on fixed logits); the likeliest token is one argmax and needs neither.
"""

import secrets
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from llmcli.runtime.sampling import RANDOM, SEEDS, Sampling
from llmcli.runtime.sampling.base import Apply, Learning, Logits, Native, Pick, Selector, Words
from llmcli.runtime.sampling.truncate import pick, probabilities


class Row(Protocol):
    """One row of a forward pass; reading its logits is not free."""

    @property
    def logits(self) -> Logits: ...

    def log_sum(self, near: float) -> float:
        """log Σ exp over the whole vocabulary; quickest where `near` is about the largest logit."""
        ...


class Chain(Protocol):
    """Draws tokens for one sequence; it may remember what it drew."""

    def draw(self, row: Row, tokens: list[int]) -> int:
        """The next token after `tokens` (prompt and answer so far)."""
        ...

    def close(self) -> None: ...


@runtime_checkable
class Choosing(Chain, Protocol):
    """A chain that can draw from a few tokens without the others being looked at."""

    def draw_among(self, row: Row, few: NDArray[np.int64], tokens: list[int]) -> int:
        """The token that draw() would take, were all but `few` impossible."""
        ...


@runtime_checkable
class Summing(Chain, Protocol):
    """A chain that looks at a row once for its log-sum and for the draw."""

    def log_sum(self, row: Row, near: float) -> float:
        """row.log_sum(near). draw() must follow, with the same row, not written to."""
        ...


class NativeChains(Protocol):
    """What the binding offers: a chain of llama.cpp samplers, and the likeliest token of a row as
    it is.
    """

    def chain(self, steps: list[Native], seed: int) -> Chain: ...

    def greedy(self) -> Chain: ...


class Greedy:
    """The likeliest token after `steps`; of equals the one with the lowest id, as llama.cpp."""

    def __init__(self, steps: list[Apply]) -> None:
        self.steps = steps

    def draw(self, row: Row, tokens: list[int]) -> int:
        logits = row.logits
        for step in self.steps:
            logits = step(logits, tokens)
        return int(logits.argmax())

    def close(self) -> None:
        """Nothing is held."""


class NumpyChain:
    """The steps one after the other, each with its chance, then one draw from what is left."""

    def __init__(self, steps: list[tuple[Apply, float]], seed: int, last: Pick = pick) -> None:
        self.steps, self.last, self.random = steps, last, np.random.default_rng(seed)
        self._kept: Logits | None = None

    def draw(self, row: Row, tokens: list[int]) -> int:
        return self.last(self._left(row, tokens), self.random)

    def _left(self, row: Row, tokens: list[int]) -> Logits:
        """What is left to draw from, the coins thrown."""
        logits = row.logits
        for step, chance in self.steps:
            if chance == 1 or self.random.random() < chance:
                logits = step(logits, tokens)
        return logits

    def probabilities(self, row: Row, tokens: list[int]) -> Logits:
        """Instead of a draw, its distribution [n_vocab], the coins thrown; `took` then hears what
        came of it.
        """
        left = self._left(row, tokens)
        self._kept = self.last.kept(left) if isinstance(self.last, Learning) else left
        return probabilities(self._kept)

    def took(self, token: int) -> None:
        """`token` was drawn from those probabilities."""
        if self._kept is not None and isinstance(self.last, Learning):
            self.last.learn(self._kept, token)

    def close(self) -> None:
        """Nothing is held."""


def concrete_seed(seed: int) -> int:
    """`seed`, or a fresh random one for -1; what the answer reports, so that it can be had again."""
    return secrets.randbelow(SEEDS) if seed == RANDOM else seed


def make_chain(sampling: Sampling, seed: int, native: NativeChains | None, words: Words) -> Chain:
    """The fastest chain for these settings; `native` None keeps to numpy."""
    steps = [step for step in sampling.steps if not step.neutral]
    selector = next((step for step in steps if isinstance(step, Selector)), None)
    if selector:
        steps = selector.before(sampling.steps)
    if sampling.greedy:
        reordering = [step.bound(words) for step in steps if step.reorders]
        return Greedy(reordering) if reordering or not native else native.greedy()
    named = [step.native() for step in (*steps, selector) if step]
    if native and all(named):
        return native.chain([part for parts in named if parts for part in parts], seed)
    last = selector.start() if selector else pick
    return NumpyChain([(step.bound(words), step.chance) for step in steps], seed, last)
