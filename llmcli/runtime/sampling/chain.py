"""Sampler chains: the steps of the sampler in order, and then the draw of one token.

A chain exists in three forms. The numpy chain can run every step. The chain of llama.cpp samplers
is faster, and is used when llama.cpp has all steps (tests check that both keep the same tokens on
fixed logits). The greedy chain, for temperature 0, is an argmax.
"""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from llmcli.runtime.sampling import N_SEEDS, RANDOM_SEED, Sampling
from llmcli.runtime.sampling.base import (
    AdaptivePicker,
    ApplyStep,
    Logits,
    NativeStep,
    SamplerStep,
    SelectorStep,
    TokenPicker,
)
from llmcli.runtime.sampling.truncate import draw_token, softmax
from llmcli.runtime.vocabulary import Vocabulary


class RowLogits(Protocol):
    """The logits of one token of a forward pass, `[n_vocab]`. Reading `logits` may wait for the
    pass or copy the logits from a device.
    """

    @property
    def logits(self) -> Logits: ...

    def log_sum(self, near: float) -> float:
        """Return the logarithm of the sum of exp(logits). `near`: a guess of the largest logit,
        which speeds up the computation if it is close; NaN if there is none.
        """
        ...


class SamplerChain(Protocol):
    """Draws the tokens of one sequence. A draw may depend on earlier draws of the same chain."""

    def draw(self, row: RowLogits, tokens: list[int]) -> int:
        """Return the next token after `tokens` (prompt and answer so far)."""
        ...

    def close(self) -> None: ...


@runtime_checkable
class ChoosingChain(SamplerChain, Protocol):
    """A chain that can draw from a few given tokens without a scan of all logits."""

    def draw_among(self, row: RowLogits, few: NDArray[np.int64], tokens: list[int]) -> int:
        """Return the token that draw() would return if the logits of all tokens except `few` were
        -inf.

        Shapes: few `[tokens]` (token ids).
        """
        ...


@runtime_checkable
class SummingChain(SamplerChain, Protocol):
    """A chain that computes a row's log-sum and prepares the draw from it in a single scan."""

    def log_sum(self, row: RowLogits, near: float) -> float:
        """Return row.log_sum(near). The next call of draw() must pass the same unchanged row."""
        ...


@dataclass(slots=True, eq=False)
class PlannedDraw:
    """A draw that is planned before a pass, and made together with those of other sequences before
    the strategy of its sequence asks for it, and its result.

    - `row_number`: that of its row among the rows of logits of the pass.
    - `tokens`: the prompt and the answer so far.
    - `banned`: the ids of tokens that must not be drawn, `[tokens]`; None for none.
    - `near`: a guess of the largest logit, if the log-sum of the row is wanted.
    - `row`: the row from which it was made. None if it was not made.
    - `token`: the drawn token. None if the strategy must draw it.
    - `log_sum`: that of the unchanged row. None if it was not computed.
    - `seconds`: this draw's share of the time.
    """

    chain: SamplerChain
    row_number: int
    tokens: list[int]
    banned: NDArray[np.int32] | None = None
    near: float | None = None
    row: RowLogits | None = None
    token: int | None = None
    log_sum: float | None = None
    seconds: float = 0.0


class JointDraw(Protocol):
    """Draws of different sequences, prepared before a pass."""

    def draw(self, rows: Sequence[RowLogits]) -> None:
        """Make the draws from the rows of the pass, and fill in their results. The tokens are those
        that the chains would draw one by one.
        """
        ...


class NativeChainFactory(Protocol):
    """Makes the sampler chains that run in C."""

    def chain(self, steps: list[NativeStep], seed: int) -> SamplerChain:
        """Return a chain of these llama.cpp samplers."""
        ...

    def greedy(self, steps: list[NativeStep]) -> SamplerChain | None:
        """Return a chain that takes the likeliest token after these llama.cpp samplers, each of
        which changes single tokens. Return None if such a chain cannot run in C.
        """
        ...

    def can_plan(self, chain: SamplerChain) -> bool:
        """Return whether prepare_draws() accepts draws of a chain."""
        ...

    def prepare_draws(self, draws: Sequence[PlannedDraw]) -> JointDraw:
        """Prepare these draws of different sequences."""
        ...


class GreedyChain:
    """Applies `steps`, then takes the likeliest token. Of equally likely tokens it takes the one
    with the lowest id, like llama.cpp.
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
    """Applies the steps in order, and then draws one of the tokens that no step has dropped. A step
    with a probability below 1 is applied to a random share of the tokens.
    """

    def __init__(
        self, steps: list[tuple[ApplyStep, float]], seed: int, picker: TokenPicker = draw_token
    ) -> None:
        """`steps`: each step with the probability of its application. `picker`: draws from the
        logits after all steps.
        """
        self.steps, self.picker, self.random = steps, picker, np.random.default_rng(seed)
        self._final_logits: Logits | None = None  # those of the last call of probabilities()

    def draw(self, row: RowLogits, tokens: list[int]) -> int:
        return self.picker(self._apply_steps(row, tokens), self.random)

    def _apply_steps(self, row: RowLogits, tokens: list[int]) -> Logits:
        """Return the logits of `row` after all steps. A step with a probability below 1 is applied
        or left out at random here.
        """
        logits = row.logits
        for step, probability in self.steps:
            if probability == 1 or self.random.random() < probability:
                logits = step(logits, tokens)
        return logits

    def probabilities(self, row: RowLogits, tokens: list[int]) -> Logits:
        """Return the distribution `[n_vocab]` of the next token, without drawing it. The caller
        must draw the token and report it to `record_draw`.
        """
        logits = self._apply_steps(row, tokens)
        self._final_logits = (
            self.picker.truncate(logits) if isinstance(self.picker, AdaptivePicker) else logits
        )
        return softmax(self._final_logits)

    def record_draw(self, token: int) -> None:
        """Record that the caller drew `token` from the distribution that `probabilities` returned
        last.
        """
        if self._final_logits is not None and isinstance(self.picker, AdaptivePicker):
            self.picker.record_draw(self._final_logits, token)

    def close(self) -> None:
        """Do nothing: no resources are used."""


def resolve_seed(seed: int) -> int:
    """Return `seed`, or a new random seed for -1. An answer reports the resolved seed, so that it
    can be repeated.
    """
    return secrets.randbelow(N_SEEDS) if seed == RANDOM_SEED else seed


def make_chain(
    sampling: Sampling, seed: int, native: NativeChainFactory | None, vocabulary: Vocabulary
) -> SamplerChain:
    """Return the fastest chain that computes these settings. Steps whose settings have no effect
    are left out.

    `seed`: a seed that `resolve_seed` returned. `native`: makes the chains that run in C; with None
    every chain runs in numpy.
    """
    steps = [step for step in sampling.steps if not step.is_neutral]
    selector = next((step for step in steps if isinstance(step, SelectorStep)), None)
    if selector:
        steps = selector.preceding_steps(sampling.steps)
    if sampling.is_greedy and not any(step.needs_all_steps for step in steps):
        reordering = [step for step in steps if step.can_reorder]
        samplers = native_samplers(reordering)
        chain = native.greedy(samplers) if native and samplers is not None else None
        return chain or GreedyChain([step.bind(vocabulary) for step in reordering])
    samplers = native_samplers([*steps, selector] if selector else steps)
    if native and samplers is not None:
        return native.chain(samplers, seed)
    draw = selector.start() if selector else draw_token
    return NumpyChain([(step.bind(vocabulary), step.probability) for step in steps], seed, draw)


def native_samplers(steps: Sequence[SamplerStep]) -> list[NativeStep] | None:
    """Return the llama.cpp samplers that compute the same as these steps, or None if a step has
    none.
    """
    groups = [step.native() for step in steps]
    if not all(groups):
        return None
    return [sampler for group in groups if group for sampler in group]
