"""Top-a sampling: drop tokens with p < top_a * (largest p)²."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from llmcli.runtime.sampling.base import Logits, NumberLimits, SamplerStep, setting
from llmcli.runtime.sampling.truncate import softmax


@dataclass(frozen=True, slots=True)
class TopA(SamplerStep):
    """The step top-a of the sampler chain. It keeps tokens with p >= top_a * (largest p)²."""

    top_a: float = setting(
        0.0, "drop tokens below this share of max(p)², 0 = off", NumberLimits(0, 1)
    )
    name: ClassVar[str] = "top_a"
    order: ClassVar[int] = 52  # between min-p and XTC

    @property
    def is_neutral(self) -> bool:
        return self.top_a == 0

    def __call__(self, logits: Logits, tokens: list[int]) -> Logits:
        p = softmax(logits)
        return np.where(p >= self.top_a * p.max() ** 2, logits, -np.inf).astype(np.float32)


STEPS = (TopA,)
