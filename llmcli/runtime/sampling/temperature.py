"""Temperature: divides the logits by a factor, which is fixed or depends on the entropy (dynamic
temperature). A factor above 1 flattens the distribution, a factor below 1 sharpens it.
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

# Logits divided by a smaller temperature may overflow, and llama.cpp would then take any token.
MIN_TEMPERATURE = 1e-6


@dataclass(frozen=True, slots=True)
class Temperature(SamplerStep):
    """Divides the logits by `temp`. With `temp` 0, only the likeliest token has a finite logit.

    With a `dynatemp_range` above 0, the temperature is low + (high − low) · (entropy / maximum
    entropy) ^ exponent, where low = temp − range and high = temp + range. The entropy is that of
    the tokens that are not dropped (llama.cpp's temp-ext).
    """

    temp: float = setting(
        0.8,
        "temperature, 0 = always the likeliest token",
        NumberLimits(0, 100),
        aliases=("temperature",),
    )
    dynatemp_range: float = setting(
        0.0, "vary the temperature by up to this with the entropy, 0 = off", NumberLimits(0, 100)
    )
    dynatemp_exponent: float = setting(
        1.0,
        "exponent from entropy to temperature",
        NumberLimits(0, 100),
        "--dynatemp-exp",
        aliases=("dynatemp_exp",),
    )
    name: ClassVar[str] = "temperature"
    order: ClassVar[int] = 60
    off_values: ClassVar[Mapping[str, Any]] = MappingProxyType({"temp": 1.0, "dynatemp_range": 0.0})
    order_names: ClassVar[tuple[str, ...]] = ("temperature", "temp", "t")

    @property
    def is_neutral(self) -> bool:
        return self.temp == 1 and self.dynatemp_range == 0

    def __call__(self, logits: Logits, tokens: list[int]) -> Logits:
        temp = np.float32(
            self._dynamic_temperature(logits) if self.temp and self.dynatemp_range else self.temp
        )
        if temp < np.finfo(np.float32).tiny:
            out = np.full_like(logits, -np.inf)
            out[logits.argmax()] = logits.max()
            return out
        if temp < MIN_TEMPERATURE:
            with np.errstate(over="ignore"):
                return np.asarray((logits - logits.max()) / temp, np.float32)
        return logits / temp

    def _dynamic_temperature(self, logits: Logits) -> float:
        """Return the temperature for the entropy of these logits. It is 1 when only one token is
        possible.
        """
        alive = logits[logits >= logits.max() + np.log(NEGLIGIBLE_SHARE)]
        if len(alive) < 2:
            return 1.0
        p = np.exp(alive - alive.max())
        p /= p.sum()
        entropy = float(-(p * np.log(p)).sum())
        low, high = max(0.0, self.temp - self.dynatemp_range), self.temp + self.dynatemp_range
        return float(
            low + (high - low) * max(0.0, entropy / np.log(len(alive))) ** self.dynatemp_exponent
        )

    def native(self) -> tuple[NativeStep, ...] | None:
        if self.temp == 0:
            return (("temp", (0.0,)),)
        if np.float32(self.temp) - np.float32(self.dynatemp_range) < MIN_TEMPERATURE:
            return None
        if not self.dynatemp_range:
            return (("temp", (self.temp,)),)
        return ("min_p", (NEGLIGIBLE_SHARE, 1)), (
            "temp_ext",
            (self.temp, self.dynatemp_range, self.dynatemp_exponent),
        )


STEPS = (Temperature,)
