"""Drawing one token from one row of logits, for one sequence.

The numpy chain is the truth. Where every step has a native form the same chain runs inside
llama.cpp (tested equal on fixed logits); the likeliest token is one argmax and needs neither.
"""

import secrets
from typing import Protocol

import numpy as np

from llmcli.runtime.sampling import RANDOM, Sampling
from llmcli.runtime.sampling.base import Logits, Native, Step
from llmcli.runtime.sampling.truncate import probabilities


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


class NativeChains(Protocol):
    """What the binding offers: a chain of llama.cpp samplers."""

    def chain(self, steps: list[Native], seed: int) -> Chain: ...


class Greedy:
    """The likeliest token after `steps`; of equals the one with the lowest id, as llama.cpp."""

    def __init__(self, steps: list[Step]) -> None:
        self.steps = steps

    def draw(self, row: Row, tokens: list[int]) -> int:
        logits = row.logits
        for step in self.steps:
            logits = step(logits, tokens)
        return int(logits.argmax())

    def close(self) -> None:
        """Nothing is held."""


class NumpyChain:
    """The steps one after the other, then one draw from what is left."""

    def __init__(self, steps: list[Step], seed: int) -> None:
        self.steps, self.random = steps, np.random.default_rng(seed)

    def draw(self, row: Row, tokens: list[int]) -> int:
        logits = row.logits
        for step in self.steps:
            logits = step(logits, tokens)
        alive = np.flatnonzero(np.isfinite(logits))
        assert len(alive), "every candidate was dropped"
        p = probabilities(logits[alive]).astype(np.float64)
        return int(
            alive[np.searchsorted(np.cumsum(p), self.random.random() * p.sum(), side="right").clip(0, len(alive) - 1)]
        )

    def close(self) -> None:
        """Nothing is held."""


def concrete_seed(seed: int) -> int:
    """`seed`, or a fresh random one for -1; what the answer reports, so that it can be had again."""
    return secrets.randbits(32) if seed == RANDOM else seed


def make_chain(sampling: Sampling, seed: int, native: NativeChains | None) -> Chain:
    """The fastest chain for these settings; `native` None keeps to numpy."""
    active = [step for step in sampling.steps if not step.neutral]
    if sampling.greedy:
        return Greedy([step for step in active if step.reorders])
    named = [name for step in active if (name := step.native())]
    if native is None or len(named) < len(active):
        return NumpyChain(active, seed)
    return native.chain(named, seed)
