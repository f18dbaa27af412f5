"""Sampler chains, which draw one token from one row of logits.

The numpy chain is the reference. When every step has a native form, the same chain runs inside
llama.cpp (tests check that both are equal on fixed logits). A greedy draw needs neither, because
the likeliest token is an argmax.
"""

import secrets
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from llmcli.runtime.sampling import N_SEEDS, RANDOM_SEED, Sampling
from llmcli.runtime.sampling.base import (
    ApplyStep,
    LearningPick,
    Logits,
    NativeStep,
    PickToken,
    SelectorStep,
)
from llmcli.runtime.sampling.truncate import draw_token, softmax
from llmcli.runtime.vocabulary import Vocabulary


class RowLogits(Protocol):
    """One row of logits of a forward pass. Reading `logits` may have to wait or copy."""

    @property
    def logits(self) -> Logits: ...

    def log_sum(self, near: float) -> float:
        """Return the log of the sum of exp(logits). Fastest when `near` is close to the largest
        logit.
        """
        ...


class SamplerChain(Protocol):
    """Draws the tokens of one sequence. A draw may depend on earlier draws."""

    def draw(self, row: RowLogits, tokens: list[int]) -> int:
        """Return the next token after `tokens` (prompt and answer so far)."""
        ...

    def close(self) -> None: ...


@runtime_checkable
class ChoosingChain(SamplerChain, Protocol):
    """A chain that can draw from a few tokens without scanning the others."""

    def draw_among(self, row: RowLogits, few: NDArray[np.int64], tokens: list[int]) -> int:
        """Return the token that draw() would return if all but `few` were impossible.

        Shapes: few `[tokens]` (token ids).
        """
        ...


@runtime_checkable
class SummingChain(SamplerChain, Protocol):
    """A chain that scans a row once for its log-sum and for the draw."""

    def log_sum(self, row: RowLogits, near: float) -> float:
        """Return row.log_sum(near). The next call of draw() must have the same row, unchanged."""
        ...


class NativeChainFactory(Protocol):
    """The chains that the binding offers: chains of llama.cpp samplers, and a chain that takes the
    likeliest token of an unchanged row.
    """

    def chain(self, steps: list[NativeStep], seed: int) -> SamplerChain: ...

    def greedy(self) -> SamplerChain: ...


class GreedyChain:
    """Applies `steps`, then takes the likeliest token; among equals the one with the lowest id,
    like llama.cpp.
    """

    def __init__(self, steps: list[ApplyStep]) -> None:
        self.steps = steps

    def draw(self, row: RowLogits, tokens: list[int]) -> int:
        logits = row.logits
        for step in self.steps:
            logits = step(logits, tokens)
        return int(logits.argmax())

    def close(self) -> None:
        """Do nothing: no resources are used."""


class NumpyChain:
    """Applies the steps in order, each with its probability, then draws one of the tokens that are
    left.
    """

    def __init__(
        self, steps: list[tuple[ApplyStep, float]], seed: int, picker: PickToken = draw_token
    ) -> None:
        self.steps, self.picker, self.random = steps, picker, np.random.default_rng(seed)
        self._kept: Logits | None = None

    def draw(self, row: RowLogits, tokens: list[int]) -> int:
        return self.picker(self._left(row, tokens), self.random)

    def _left(self, row: RowLogits, tokens: list[int]) -> Logits:
        """Return the logits after all steps. Random decisions about steps are made here."""
        logits = row.logits
        for step, chance in self.steps:
            if chance == 1 or self.random.random() < chance:
                logits = step(logits, tokens)
        return logits

    def probabilities(self, row: RowLogits, tokens: list[int]) -> Logits:
        """Return the distribution `[n_vocab]` that the next token is to be drawn from, without
        drawing. The caller draws a token and must report it by `record_draw`.
        """
        logits = self._left(row, tokens)
        self._kept = (
            self.picker.truncate(logits) if isinstance(self.picker, LearningPick) else logits
        )
        return softmax(self._kept)

    def record_draw(self, token: int) -> None:
        """Record that the caller drew `token` from the last distribution."""
        if self._kept is not None and isinstance(self.picker, LearningPick):
            self.picker.learn(self._kept, token)

    def close(self) -> None:
        """Do nothing: no resources are used."""


def resolve_seed(seed: int) -> int:
    """Return `seed`, or a random seed for -1. Answers report the resulting seed, so that they can
    be repeated.
    """
    return secrets.randbelow(N_SEEDS) if seed == RANDOM_SEED else seed


def make_chain(
    sampling: Sampling, seed: int, native: NativeChainFactory | None, vocabulary: Vocabulary
) -> SamplerChain:
    """Return the fastest chain for these settings. `native`: makes llama.cpp's chains; None always
    uses numpy.
    """
    steps = [step for step in sampling.steps if not step.is_neutral]
    selector = next((step for step in steps if isinstance(step, SelectorStep)), None)
    if selector:
        steps = selector.preceding_steps(sampling.steps)
    if sampling.is_greedy:
        reordering = [step.bind(vocabulary) for step in steps if step.can_reorder]
        return GreedyChain(reordering) if reordering or not native else native.greedy()
    native_steps = [step.native() for step in (*steps, selector) if step]
    if native and all(native_steps):
        samplers = [sampler for group in native_steps if group for sampler in group]
        return native.chain(samplers, seed)
    draw = selector.start() if selector else draw_token
    return NumpyChain([(step.bind(vocabulary), step.probability) for step in steps], seed, draw)
