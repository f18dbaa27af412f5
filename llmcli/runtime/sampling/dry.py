"""DRY: lowers the logit of a token that would continue a repetition, the more the longer the
repetition is.

Follows llama.cpp's sampler (src/llama-sampler.cpp, from koboldcpp) with its default sequence
breakers: a repetition ends at a token whose text contains a breaker, and such a token has no
penalty.
"""

from collections.abc import Container
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import numpy as np

from llmcli.runtime.sampling.base import (
    ApplyStep,
    Logits,
    NativeStep,
    NumberLimits,
    SamplerStep,
    setting,
)
from llmcli.runtime.vocabulary import Vocabulary

SEQUENCE_BREAKERS = (b"\n", b":", b'"', b"*")
# logarithm of the largest float32, an upper limit of the exponent
LOG_MAX_FLOAT = np.float32(88.7228391)
MAX_LOOKBACK = 1_000_000


@dataclass(frozen=True, slots=True)
class Dry(SamplerStep):
    """Subtracts multiplier · base ^ (length − allowed) from the logit of a token that would
    lengthen a repetition.
    """

    dry_multiplier: float = setting(
        0.0, "strength of the penalty on repeated phrases, 0 = off", NumberLimits(0, 100)
    )
    dry_base: float = setting(
        1.75, "factor of that penalty for each further repeated token", NumberLimits(1, 100)
    )
    dry_allowed_length: int = setting(
        2, "repetitions of up to this many tokens have no penalty", NumberLimits(0, MAX_LOOKBACK)
    )
    dry_penalty_last_n: int = setting(
        64, "search the last N tokens for repetitions, 0 = off", NumberLimits(0, MAX_LOOKBACK)
    )
    name: ClassVar[str] = "dry"
    order: ClassVar[int] = 15
    can_reorder: ClassVar[bool] = True

    @property
    def is_neutral(self) -> bool:
        return self.dry_multiplier == 0 or self.dry_penalty_last_n == 0

    def __call__(self, logits: Logits, tokens: list[int]) -> Logits:
        return self.penalize(logits, tokens, ())

    def bind(self, vocabulary: Vocabulary) -> ApplyStep:
        texts = ((token, vocabulary.piece(token)) for token in range(vocabulary.n_vocab))
        breakers = frozenset(
            token for token, text in texts if any(mark in text for mark in SEQUENCE_BREAKERS)
        )
        return partial(self.penalize, breakers=breakers)

    def penalize(self, logits: Logits, tokens: list[int], breakers: Container[int]) -> Logits:
        """Return new logits. `breakers`: the tokens at which a repetition ends.

        Shapes: logits `[n_vocab]`, result `[n_vocab]`.
        """
        if self.is_neutral:
            return logits
        lengths = {
            token: length
            for token, length in self._repeats(tokens, breakers).items()
            if token not in breakers
        }
        if not lengths:
            return logits
        base = np.float32(self.dry_base)
        powers = np.fromiter(lengths.values(), np.int64) - self.dry_allowed_length
        if base > 1.000001:
            powers = np.minimum(powers, int(LOG_MAX_FLOAT / np.log(base)))
        ids = np.fromiter(lengths, np.int64)
        out = logits.copy()
        out[ids] -= (float(np.float32(self.dry_multiplier)) * float(base) ** powers).astype(
            np.float32
        )
        return out

    def _repeats(self, tokens: list[int], breakers: Container[int]) -> dict[int, int]:
        """Return a dictionary of all tokens that would continue a repetition. The value is the
        length of the longest repetition that the token would continue.
        """
        back = tokens[: -self.dry_penalty_last_n - 1 : -1]  # newest first
        if len(back) <= self.dry_allowed_length:
            return {}
        reach = next((age for age, token in enumerate(back) if token in breakers), len(back))
        if reach < self.dry_allowed_length:
            return {}
        longest: dict[int, int] = {}
        for age, length in enumerate(_matches(back)):
            length = min(length, reach)
            if (
                age and length >= self.dry_allowed_length
            ):  # the last `length` tokens also occur `age` tokens earlier
                follower = back[age - 1]
                longest[follower] = max(length, longest.get(follower, 0))
        return longest

    def native(self) -> tuple[NativeStep, ...]:
        values = (
            self.dry_multiplier,
            self.dry_base,
            self.dry_allowed_length,
            self.dry_penalty_last_n,
        )
        return (("dry", (*values, SEQUENCE_BREAKERS)),)


def _matches(tokens: list[int]) -> list[int]:
    """Return for each position how many tokens from there on equal the tokens at the start of the
    list (the Z function, in linear time).
    """
    count = len(tokens)
    lengths = [0] * count
    start = stop = 0  # the match that ends last: tokens[start:stop] == tokens[: stop - start]
    for position in range(1, count):
        length = min(lengths[position - start], stop - position) if position < stop else 0
        while position + length < count and tokens[length] == tokens[position + length]:
            length += 1
        lengths[position] = length
        if position + length > stop:
            start, stop = position, position + length
    return lengths


STEPS = (Dry,)
