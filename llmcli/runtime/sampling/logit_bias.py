"""Logit bias: adds a number to the logits of single tokens, in the syntax of llama-cli's
--logit-bias.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import numpy as np

from llmcli.errors import UserError
from llmcli.runtime.sampling.base import Logits, NativeStep, SamplerStep, setting

BIAS_PATTERN = re.compile(
    r"\s*([0-9]{1,9})\s*([+-])\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+|inf)\s*", re.IGNORECASE
)
MAX_BIAS = 1000.0
OFF_WORDS = ("", "none", "off")


@dataclass(frozen=True, slots=True)
class BiasValues:
    """The allowed values of the setting `logit_bias`: any number of texts such as `15043+1`, each a
    token id, a sign and a number. `15043-inf` forbids the token.
    """

    metavar: ClassVar[str] = "TOKEN_ID(+/-)BIAS"
    is_list: ClassVar[bool] = True

    def parse(self, name: str, value: Any, kind: type) -> tuple[str, ...]:
        """Return the biases in `value`, one text for each. `value` is a text with any number of
        biases, a list of texts with one bias each, or a dictionary of token ids and numbers (as in
        the OpenAI API).

        Raises UserError for a wrong spelling or a bias above MAX_BIAS.
        """
        if isinstance(value, str):
            value = [] if value.strip().lower() in OFF_WORDS else value.replace(",", " ").split()
        elif isinstance(value, Mapping):
            value = [
                f"{token}{bias:+}" if isinstance(bias, int | float) else bias
                for token, bias in value.items()
            ]
        if not isinstance(value, Iterable):
            raise self._syntax_error(name, value)
        return tuple(self._check_bias(name, entry) for entry in value)

    def _check_bias(self, name: str, entry: Any) -> str:
        """Return one bias without spaces and in lower case. Raises UserError like `parse`."""
        match = BIAS_PATTERN.fullmatch(entry) if isinstance(entry, str) else None
        if not match:
            raise self._syntax_error(name, entry)
        token, sign, amount = int(match[1]), match[2], float(match[3])
        if amount > MAX_BIAS and (sign, amount) != ("-", float("inf")):
            raise UserError(
                f"the bias in {name} {entry} is too large",
                hint=f"at most {MAX_BIAS:g}, or -inf to forbid it",
            )
        return f"{token}{sign}{match[3].lower()}"

    def _syntax_error(self, name: str, entry: object) -> UserError:
        """Return the error for a value that is not a bias. `name`: the name of the setting."""
        flag = name.replace("_", "-")
        return UserError(
            f"{name} is {repr(entry)[:100]}",
            hint=f"--{flag} takes a token's id and a bias: 15043+1, 2-inf",
        )

    def format_value(self, value: tuple[str, ...]) -> str:
        return " ".join(value) or "none"

    def __str__(self) -> str:
        return f"from -{MAX_BIAS:g} to +{MAX_BIAS:g}, or -inf"


@dataclass(frozen=True, slots=True)
class LogitBias(SamplerStep):
    """Adds the given biases to the logits. Several biases of the same token add up."""

    logit_bias: tuple[str, ...] = setting(
        (),
        "make a token likelier (15043+1), less likely (15043-1) or impossible (15043-inf)",
        BiasValues(),
        "-l",
    )
    name: ClassVar[str] = "logit_bias"
    order: ClassVar[int] = 5
    can_reorder: ClassVar[bool] = True

    @property
    def is_neutral(self) -> bool:
        return not self.logit_bias

    def __call__(self, logits: Logits, tokens: list[int]) -> Logits:
        if self.is_neutral:
            return logits
        ids, biases = zip(*parse_biases(self.logit_bias), strict=True)
        out = logits.copy()
        np.add.at(out, np.array(ids), np.array(biases, np.float32))
        return out

    def native(self) -> tuple[NativeStep, ...]:
        return (("logit_bias", parse_biases(self.logit_bias)),)


@cache
def parse_biases(texts: tuple[str, ...]) -> tuple[tuple[int, float], ...]:
    """Return for each bias a pair of the token id and the number to add to its logit. `texts`: the
    biases as `BiasValues.parse` returns them.
    """
    matches = [BIAS_PATTERN.fullmatch(text) for text in texts]
    return tuple((int(match[1]), float(match[2] + match[3])) for match in matches if match)


def check_biases(texts: tuple[str, ...], n_vocab: int) -> None:
    """Raise UserError when a bias has a token id outside a vocabulary of `n_vocab` tokens, or when
    the biases forbid every token.
    """
    biases = parse_biases(texts)
    for token, _ in biases:
        if token >= n_vocab:
            raise UserError(
                f"logit_bias names token {token}, but the vocabulary ends at {n_vocab - 1}",
                hint="run --json shows the ids of a model's tokens",
            )
    if len({token for token, bias in biases if bias == -np.inf}) == n_vocab:
        raise UserError(
            "logit_bias forbids every token of the vocabulary", hint="forbid fewer tokens"
        )


STEPS = (LogitBias,)
