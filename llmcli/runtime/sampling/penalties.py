"""Repetition, presence and frequency penalties: lower the logits of tokens that occurred before
(llama.cpp's penalties sampler; CTRL, Keskar et al. 2019).
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np

from llmcli.runtime.sampling.base import (
    MAX_WINDOW,
    WHOLE_CONTEXT,
    Logits,
    NativeStep,
    NumberLimits,
    SamplerStep,
    recent_tokens,
    setting,
)

PENALTY_LIMITS = NumberLimits(-100, 100)


@dataclass(frozen=True, slots=True)
class Penalties(SamplerStep):
    """Lowers the logits of the tokens that occur among the last `repeat_last_n` tokens of the
    prompt and the answer.
    """

    repeat_penalty: float = setting(
        1.0,
        "divide the logits of recent tokens by this, 1 = off",
        NumberLimits(0, 100, open_low=True),
    )
    repeat_last_n: int = setting(
        64,
        "apply the penalties to the last N tokens, 0 = off, -1 = the whole context",
        NumberLimits(WHOLE_CONTEXT, MAX_WINDOW),
    )
    presence_penalty: float = setting(
        0.0, "subtract this from logits of tokens that occurred, 0 = off", PENALTY_LIMITS
    )
    frequency_penalty: float = setting(
        0.0, "subtract this for each time a token occurred, 0 = off", PENALTY_LIMITS
    )
    name: ClassVar[str] = "penalties"
    order: ClassVar[int] = 10
    can_reorder: ClassVar[bool] = True
    off_values: ClassVar[Mapping[str, Any]] = MappingProxyType(
        {"repeat_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
    )
    order_names: ClassVar[tuple[str, ...]] = ("penalties", "e")

    @property
    def is_neutral(self) -> bool:
        has_no_penalty = (
            self.repeat_penalty == 1 and self.presence_penalty == 0 and self.frequency_penalty == 0
        )
        return has_no_penalty or self.repeat_last_n == 0

    def __call__(self, logits: Logits, tokens: list[int]) -> Logits:
        counts = Counter(recent_tokens(tokens, self.repeat_last_n))
        if not counts or self.is_neutral:
            return logits
        ids = np.fromiter(counts.keys(), np.int64)
        times = np.fromiter(counts.values(), np.float32)
        out = logits.copy()
        values = out[ids]
        scale = np.float32(self.repeat_penalty)
        values = np.where(values <= 0, values * scale, values / scale)
        # one sum first, as in llama.cpp, so that both round alike
        out[ids] = values - (
            times * np.float32(self.frequency_penalty) + np.float32(self.presence_penalty)
        )
        return out

    def native(self) -> tuple[NativeStep, ...]:
        values = (
            MAX_WINDOW if self.repeat_last_n == WHOLE_CONTEXT else self.repeat_last_n,
            self.repeat_penalty,
            self.frequency_penalty,
            self.presence_penalty,
        )
        return (("penalties", values),)


STEPS = (Penalties,)
