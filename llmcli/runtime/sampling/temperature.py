"""Temperature: how bold the draw is."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from llmcli.runtime.sampling.base import Limits, Logits, Native, setting


@dataclass(frozen=True, slots=True)
class Temperature:
    """Divide the logits by `temp`; 0 takes the likeliest token, exactly."""

    temp: float = setting(0.8, "temperature, 0 = always the likeliest token", Limits(0, 100), aliases=("temperature",))
    name: ClassVar[str] = "temperature"
    order: ClassVar[int] = 60
    reorders: ClassVar[bool] = False

    @property
    def neutral(self) -> bool:
        return self.temp == 1

    def __call__(self, logits: Logits, tokens: list[int]) -> Logits:
        if self.temp == 0:
            out = np.full_like(logits, -np.inf)
            out[logits.argmax()] = logits.max()
            return out
        return logits / np.float32(self.temp)

    def native(self) -> Native:
        return "temp", (self.temp,)


STEPS = (Temperature,)
