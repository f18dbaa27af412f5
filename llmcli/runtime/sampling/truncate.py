"""Truncation: the sampler steps top-k, typical, top-p and min-p, which drop unlikely tokens
(llama.cpp src/llama-sampler.cpp). Also the softmax and the random draw of the numpy chain.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np

from llmcli.runtime.sampling.base import (
    NEGLIGIBLE_SHARE,
    Logits,
    NativeStep,
    NumberLimits,
    SamplerStep,
    setting,
)

PROBABILITY_LIMITS = NumberLimits(0, 1)


@dataclass(frozen=True, slots=True)
class TopK(SamplerStep):
    """Drops all but the `top_k` likeliest tokens; 0 or -1 drops none."""

    top_k: int = setting(
        40, "keep the k likeliest tokens, 0 or -1 = all", NumberLimits(-1, 10_000_000)
    )
    name: ClassVar[str] = "top_k"
    order: ClassVar[int] = 20
    off_values: ClassVar[Mapping[str, Any]] = MappingProxyType({"top_k": 0})
    order_names: ClassVar[tuple[str, ...]] = ("top_k", "k")

    @property
    def is_neutral(self) -> bool:
        return self.top_k <= 0

    def __call__(self, logits: Logits, tokens: list[int]) -> Logits:
        if not 0 < self.top_k < len(logits):
            return logits
        keep = np.argpartition(logits, -self.top_k)[-self.top_k :]
        return keep_only(logits, keep)

    def native(self) -> tuple[NativeStep, ...]:
        return (("top_k", (self.top_k,)),)


@dataclass(frozen=True, slots=True)
class TypicalP(SamplerStep):
    """Locally typical sampling (Meister et al. 2022): sorts the tokens by the distance of their
    surprise, −log p, from the entropy. Keeps the nearest ones whose probabilities add up to
    `typical`, and drops the others.
    """

    typical: float = setting(
        1.0, "locally typical sampling, 1 = off", PROBABILITY_LIMITS, aliases=("typical_p",)
    )
    name: ClassVar[str] = "typical"
    order: ClassVar[int] = 30
    off_values: ClassVar[Mapping[str, Any]] = MappingProxyType({"typical": 1.0})
    order_names: ClassVar[tuple[str, ...]] = ("typ_p", "typical_p", "typical", "typ", "y")

    @property
    def is_neutral(self) -> bool:
        return self.typical >= 1

    def __call__(self, logits: Logits, tokens: list[int]) -> Logits:
        if self.is_neutral:
            return logits
        alive = np.flatnonzero(np.isfinite(logits))
        p = softmax(logits[alive])
        surprise = -np.log(np.maximum(p, np.finfo(np.float32).tiny))
        order = np.argsort(np.abs(surprise - (p * surprise).sum()), kind="stable")
        last = int(np.searchsorted(np.cumsum(p[order]), self.typical, side="right"))
        return keep_only(logits, alive[order[: last + 1]])

    def native(self) -> tuple[NativeStep, ...]:
        return ("min_p", (NEGLIGIBLE_SHARE, 1)), ("typical", (self.typical, 1))


@dataclass(frozen=True, slots=True)
class TopP(SamplerStep):
    """Nucleus sampling (Holtzman et al. 2020): keeps the fewest likeliest tokens whose
    probabilities add up to at least `top_p`, and drops the others.
    """

    top_p: float = setting(
        0.95, "keep the likeliest tokens up to this total probability, 1 = all", PROBABILITY_LIMITS
    )
    name: ClassVar[str] = "top_p"
    order: ClassVar[int] = 40
    off_values: ClassVar[Mapping[str, Any]] = MappingProxyType({"top_p": 1.0})
    order_names: ClassVar[tuple[str, ...]] = ("top_p", "nucleus", "p")

    @property
    def is_neutral(self) -> bool:
        return self.top_p >= 1

    def __call__(self, logits: Logits, tokens: list[int]) -> Logits:
        if self.is_neutral:
            return logits
        alive = np.flatnonzero(np.isfinite(logits))
        p = softmax(logits[alive])
        order = np.argsort(-p, kind="stable")
        last = int(np.searchsorted(np.cumsum(p[order]), self.top_p, side="left"))
        return keep_only(logits, alive[order[: last + 1]])

    def native(self) -> tuple[NativeStep, ...]:
        return (("top_p", (self.top_p, 1)),)


@dataclass(frozen=True, slots=True)
class MinP(SamplerStep):
    """Drops the tokens whose probability is below `min_p` times that of the likeliest token."""

    min_p: float = setting(
        0.05,
        "drop tokens less likely than this share of the likeliest, 0 = off",
        PROBABILITY_LIMITS,
    )
    name: ClassVar[str] = "min_p"
    order: ClassVar[int] = 50
    off_values: ClassVar[Mapping[str, Any]] = MappingProxyType({"min_p": 0.0})
    order_names: ClassVar[tuple[str, ...]] = ("min_p", "m")

    @property
    def is_neutral(self) -> bool:
        return self.min_p == 0

    def __call__(self, logits: Logits, tokens: list[int]) -> Logits:
        if self.is_neutral:
            return logits
        floor = logits.max() + np.float32(np.log(self.min_p))
        return np.where(logits >= floor, logits, np.float32(-np.inf))

    def native(self) -> tuple[NativeStep, ...]:
        return (("min_p", (self.min_p, 1)),)


def softmax(logits: Logits) -> Logits:
    """Return the softmax of the logits. A logit of -inf gives the probability 0.

    Shapes: logits `[n]`, result float32 `[n]`.
    """
    p = np.exp(logits - logits.max())
    return np.asarray(p / p.sum(), np.float32)


def keep_only(logits: Logits, keep: np.ndarray) -> Logits:
    """Return the logits with -inf for all tokens that are not in `keep`.

    Shapes: logits `[n_vocab]`, keep `[tokens]` (token ids), result `[n_vocab]`.
    """
    out = np.full_like(logits, -np.inf)
    out[keep] = logits[keep]
    return out


def draw_token(logits: Logits, random: np.random.Generator) -> int:
    """Return the id of one token, drawn at random with the softmax of the logits as probabilities.

    Shapes: logits `[n_vocab]`. At least one logit must be finite.
    """
    alive = np.flatnonzero(np.isfinite(logits))
    assert len(alive), "every candidate was dropped"
    cumulative = np.cumsum(softmax(logits[alive]), dtype=np.float64)
    index = np.searchsorted(cumulative, random.random() * cumulative[-1], side="right")
    return int(alive[min(index, len(alive) - 1)])


STEPS = (TopK, TypicalP, TopP, MinP)
