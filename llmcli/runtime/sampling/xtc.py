"""Exclude top choices (XTC): sometimes drops the likeliest tokens, for more creative texts
(llama.cpp src/llama-sampler.cpp).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np

from llmcli.runtime.sampling.base import Logits, NativeStep, NumberLimits, SamplerStep, setting
from llmcli.runtime.sampling.truncate import softmax


@dataclass(frozen=True, slots=True)
class XTC(SamplerStep):
    """Of the tokens whose probability is at least `xtc_threshold`, drops all except the least
    likely one.

    Calling the step always does this. The chain calls it with the probability `xtc_probability`.
    """

    xtc_probability: float = setting(
        0.0, "how often to leave out the likeliest tokens, 0 = never", NumberLimits(0, 1)
    )
    xtc_threshold: float = setting(
        0.1, "leave out tokens from this probability on, above 0.5 = off", NumberLimits(0, 1)
    )
    name: ClassVar[str] = "xtc"
    order: ClassVar[int] = 55
    off_values: ClassVar[Mapping[str, Any]] = MappingProxyType({"xtc_probability": 0.0})
    order_names: ClassVar[tuple[str, ...]] = ("xtc", "x")

    @property
    def is_neutral(self) -> bool:
        # at most one token can have a probability above 1/2, and XTC keeps a single token
        return self.xtc_probability == 0 or self.xtc_threshold > 0.5

    @property
    def probability(self) -> float:
        return self.xtc_probability

    def __call__(self, logits: Logits, tokens: list[int]) -> Logits:
        if self.is_neutral:
            return logits
        alive = np.flatnonzero(np.isfinite(logits))
        above = alive[softmax(logits[alive]) >= np.float32(self.xtc_threshold)]
        if len(above) < 2:
            return logits
        out = logits.copy()
        out[above] = -np.inf
        least = above[logits[above].argmin()]
        out[least] = logits[least]
        return out

    def native(self) -> tuple[NativeStep, ...]:
        return (("xtc", (self.xtc_probability, self.xtc_threshold, 1)),)


STEPS = (XTC,)
