"""Top-nσ (Tang et al. 2024, arXiv:2411.07641): drops the tokens whose logit is more than n standard
deviations below the largest one (llama.cpp src/llama-sampler.cpp).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np

from llmcli.runtime.sampling.base import Logits, NativeStep, NumberLimits, SamplerStep, setting


@dataclass(frozen=True, slots=True)
class TopNSigma(SamplerStep):
    """Drops the tokens whose logit is below max − n · σ, where σ is the standard deviation of the
    logits that are not dropped yet.
    """

    top_n_sigma: float = setting(
        -1.0,
        "keep the tokens within N standard deviations of the likeliest, 0 or -1 = all",
        NumberLimits(-1, 1000),
        "--top-nsigma",
    )
    name: ClassVar[str] = "top_n_sigma"
    order: ClassVar[int] = 17
    off_values: ClassVar[Mapping[str, Any]] = MappingProxyType({"top_n_sigma": -1.0})
    order_names: ClassVar[tuple[str, ...]] = ("top_n_sigma", "s")

    @property
    def is_neutral(self) -> bool:
        return self.top_n_sigma <= 0

    def __call__(self, logits: Logits, tokens: list[int]) -> Logits:
        if self.is_neutral:
            return logits
        alive = logits[np.isfinite(logits)].astype(np.float64)
        floor = alive.max() - self.top_n_sigma * alive.std()
        return np.where(logits >= floor, logits, np.float32(-np.inf))

    def native(self) -> tuple[NativeStep, ...]:
        return (("top_n_sigma", (self.top_n_sigma,)),)


STEPS = (TopNSigma,)
