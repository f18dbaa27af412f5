"""DRY ("don't repeat yourself"): lowers the logits of tokens that would continue a repeated phrase.
The penalty grows with the length of the repetition.

This is llama.cpp's sampler (src/llama-sampler.cpp, from koboldcpp). A repetition ends at a token
whose text contains a sequence breaker, such as a line end. Such a token itself has no penalty.
"""

from collections.abc import Container, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np

from llmcli.errors import UserError
from llmcli.runtime.sampling.base import (
    MAX_WINDOW,
    WHOLE_CONTEXT,
    ApplyStep,
    Logits,
    NativeStep,
    NumberLimits,
    SamplerStep,
    recent_tokens,
    setting,
)
from llmcli.runtime.vocabulary import Vocabulary

SEQUENCE_BREAKERS = ("\n", ":", '"', "*")  # llama.cpp's defaults
MAX_BREAKERS, MAX_BREAKER_BYTES = 128, 40  # llama.cpp cuts longer breakers off
NO_BREAKERS = "none"
# Logarithm of the largest float32. It limits the exponent of the penalty, so that the penalty is
# finite.
LOG_MAX_FLOAT = np.float32(88.7228391)


@dataclass(frozen=True, slots=True)
class BreakerValues:
    """The allowed values of the setting `dry_sequence_breakers`: texts, or "none"."""

    metavar: ClassVar[str] = "TEXT"
    is_list: ClassVar[bool] = True

    def parse(self, name: str, value: Any, kind: type) -> tuple[str, ...]:
        r"""Return the breakers in `value`, a list of texts, or a text with breakers between spaces.
        `\n` and `\t` stand for the line end and the tab, and "none" for no breaker.

        Raises UserError for any other value, and for too many or too long texts.
        """
        texts = value.split() if isinstance(value, str) else value
        hint = f"give up to {MAX_BREAKERS} texts of up to {MAX_BREAKER_BYTES} bytes, or none"
        if not isinstance(texts, list | tuple) or not all(
            isinstance(text, str)
            and 0 < len(text.encode("utf-8", "replace")) <= MAX_BREAKER_BYTES
            and all(letter.isprintable() or letter in "\n\r\t" for letter in text)
            for text in texts
        ):
            raise UserError(f"{name} is {value!r}"[:100], hint=hint)
        if not 0 < len(texts) <= MAX_BREAKERS:
            raise UserError(f"{name} has {len(texts)} texts", hint=hint)
        if list(texts) == [NO_BREAKERS]:
            return ()
        return tuple(text.replace("\\n", "\n").replace("\\t", "\t") for text in texts)

    def format_value(self, value: tuple[str, ...]) -> str:
        return " ".join(value).replace("\n", "\\n").replace("\t", "\\t") or NO_BREAKERS

    def __str__(self) -> str:
        return f"texts, or {NO_BREAKERS}"


@dataclass(frozen=True, slots=True)
class Dry(SamplerStep):
    """Subtracts multiplier · base ^ (length − allowed length) from the logit of every token that
    would continue a repetition of `length` tokens.
    """

    dry_multiplier: float = setting(
        0.0, "strength of the penalty on repeated phrases, 0 = off", NumberLimits(0, 100)
    )
    dry_base: float = setting(
        1.75, "factor of that penalty for each further repeated token", NumberLimits(1, 100)
    )
    dry_allowed_length: int = setting(
        2, "repetitions of up to this many tokens have no penalty", NumberLimits(0, MAX_WINDOW)
    )
    dry_penalty_last_n: int = setting(
        64,
        "search the last N tokens for repetitions, 0 = off, -1 = the whole context",
        NumberLimits(WHOLE_CONTEXT, MAX_WINDOW),
    )
    dry_sequence_breakers: tuple[str, ...] = setting(
        SEQUENCE_BREAKERS,
        "texts at which a repetition ends, none = nowhere",
        BreakerValues(),
        "--dry-sequence-breaker",
    )
    name: ClassVar[str] = "dry"
    order: ClassVar[int] = 15
    can_reorder: ClassVar[bool] = True
    off_values: ClassVar[Mapping[str, Any]] = MappingProxyType({"dry_multiplier": 0.0})
    order_names: ClassVar[tuple[str, ...]] = ("dry", "d")

    @property
    def is_neutral(self) -> bool:
        return self.dry_multiplier == 0 or self.dry_penalty_last_n == 0

    def __call__(self, logits: Logits, tokens: list[int]) -> Logits:
        return self.penalize(logits, tokens, ())

    def bind(self, vocabulary: Vocabulary) -> ApplyStep:
        """Return a function that penalizes with the sequence breakers of this vocabulary."""
        texts = ((token, vocabulary.piece(token)) for token in range(vocabulary.n_vocab))
        breakers = frozenset(
            token for token, text in texts if any(mark in text for mark in self._breaker_bytes())
        )
        return partial(self.penalize, breakers=breakers)

    def penalize(self, logits: Logits, tokens: list[int], breakers: Container[int]) -> Logits:
        """Return the logits minus the penalties. `tokens`: the prompt and the answer so far.
        `breakers`: the ids of the tokens at which a repetition ends.

        Shapes: logits `[n_vocab]`, result `[n_vocab]`.
        """
        if self.is_neutral:
            return logits
        lengths = {
            token: length
            for token, length in self._repetition_lengths(tokens, breakers).items()
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

    def _repetition_lengths(self, tokens: list[int], breakers: Container[int]) -> dict[int, int]:
        """Return, for every token that would continue a repetition at the end of `tokens`, the
        length of the longest repetition that it would continue. Repetitions shorter than the
        allowed length are left out.
        """
        reversed_tokens = recent_tokens(tokens, self.dry_penalty_last_n)[::-1]  # newest first
        if len(reversed_tokens) <= self.dry_allowed_length:
            return {}
        # a repetition cannot reach further back than the newest breaker
        max_length = next(
            (age for age, token in enumerate(reversed_tokens) if token in breakers),
            len(reversed_tokens),
        )
        if max_length < self.dry_allowed_length:
            return {}
        longest: dict[int, int] = {}
        for age, length in enumerate(_match_lengths(reversed_tokens)):
            length = min(length, max_length)
            # the last `length` tokens of the text also occur `age` tokens earlier
            if age and length >= self.dry_allowed_length:
                next_token = reversed_tokens[
                    age - 1
                ]  # the one that followed the earlier occurrence
                longest[next_token] = max(length, longest.get(next_token, 0))
        return longest

    def native(self) -> tuple[NativeStep, ...]:
        values = (
            self.dry_multiplier,
            self.dry_base,
            self.dry_allowed_length,
            MAX_WINDOW if self.dry_penalty_last_n == WHOLE_CONTEXT else self.dry_penalty_last_n,
        )
        return (("dry", (*values, self._breaker_bytes())),)

    def _breaker_bytes(self) -> tuple[bytes, ...]:
        return tuple(text.encode("utf-8", "replace") for text in self.dry_sequence_breakers)


def _match_lengths(tokens: list[int]) -> list[int]:
    """Return for each position the length of the longest common prefix of `tokens[position:]` and
    `tokens`. Position 0 has length 0. This is the Z algorithm, which takes linear time.
    """
    count = len(tokens)
    lengths = [0] * count
    # of all matches so far, the one that ends last: tokens[start:stop] == tokens[: stop - start]
    start = stop = 0
    for position in range(1, count):
        length = min(lengths[position - start], stop - position) if position < stop else 0
        while position + length < count and tokens[length] == tokens[position + length]:
            length += 1
        lengths[position] = length
        if position + length > stop:
            start, stop = position, position + length
    return lengths


STEPS = (Dry,)
