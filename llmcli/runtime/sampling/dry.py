"""DRY: the longer a repetition has become, the less likely the token that would go on with it.

After llama.cpp's sampler of that name (src/llama-sampler.cpp, from koboldcpp). The breakers are its
default ones: a repetition does not reach across a token with one of them in its text, and such a
token is free.
"""

from collections.abc import Container
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import numpy as np

from llmcli.runtime.sampling.base import Apply, Limits, Logits, Native, Step, Words, setting

BREAKERS = (b"\n", b":", b'"', b"*")
LOG_LARGEST = np.float32(88.7228391)  # log of the largest float: what the exponent is held below
FAR = 1_000_000


@dataclass(frozen=True, slots=True)
class Dry(Step):
    """Subtract multiplier · base ^ (length − allowed) from the token that would lengthen a
    repetition.
    """

    dry_multiplier: float = setting(
        0.0, "how strongly repeated phrases are punished, 0 = off", Limits(0, 100)
    )
    dry_base: float = setting(
        1.75, "what each further repeated token multiplies that by", Limits(1, 100)
    )
    dry_allowed_length: int = setting(
        2, "repetitions of this many tokens are still free", Limits(0, FAR)
    )
    dry_penalty_last_n: int = setting(
        64, "how many tokens back repetitions are looked for, 0 = off", Limits(0, FAR)
    )
    name: ClassVar[str] = "dry"
    order: ClassVar[int] = 15
    reorders: ClassVar[bool] = True

    @property
    def neutral(self) -> bool:
        return self.dry_multiplier == 0 or self.dry_penalty_last_n == 0

    def __call__(self, logits: Logits, tokens: list[int]) -> Logits:
        return self.punished(logits, tokens, ())

    def bound(self, words: Words) -> Apply:
        texts = ((token, words.piece(token)) for token in range(words.size))
        breakers = frozenset(
            token for token, text in texts if any(mark in text for mark in BREAKERS)
        )
        return partial(self.punished, breakers=breakers)

    def punished(self, logits: Logits, tokens: list[int], breakers: Container[int]) -> Logits:
        """New logits; `breakers` are the tokens over which no repetition reaches."""
        if self.neutral:
            return logits
        lengths = {
            token: n
            for token, n in self._repeats(tokens, breakers).items()
            if token not in breakers
        }
        if not lengths:
            return logits
        base = np.float32(self.dry_base)
        powers = np.fromiter(lengths.values(), np.int64) - self.dry_allowed_length
        if base > 1.000001:
            powers = np.minimum(powers, int(LOG_LARGEST / np.log(base)))
        ids = np.fromiter(lengths, np.int64)
        out = logits.copy()
        out[ids] -= (float(np.float32(self.dry_multiplier)) * float(base) ** powers).astype(
            np.float32
        )
        return out

    def _repeats(self, tokens: list[int], breakers: Container[int]) -> dict[int, int]:
        """For each token that would lengthen a repetition: how many tokens the longest one has
        already.
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
            ):  # the end of the text stands `age` tokens earlier, too
                follower = back[age - 1]
                longest[follower] = max(length, longest.get(follower, 0))
        return longest

    def native(self) -> tuple[Native, ...]:
        values = (
            self.dry_multiplier,
            self.dry_base,
            self.dry_allowed_length,
            self.dry_penalty_last_n,
        )
        return (("dry", (*values, BREAKERS)),)


def _matches(tokens: list[int]) -> list[int]:
    """For each place, how many tokens from there on equal those at the beginning (the Z function,
    linear).
    """
    count = len(tokens)
    lengths = [0] * count
    start = stop = (
        0  # the match that reaches furthest: tokens[start:stop] == tokens[: stop - start]
    )
    for place in range(1, count):
        length = min(lengths[place - start], stop - place) if place < stop else 0
        while place + length < count and tokens[length] == tokens[place + length]:
            length += 1
        lengths[place] = length
        if place + length > stop:
            start, stop = place, place + length
    return lengths


STEPS = (Dry,)
