"""The settings of a beam search. They have the names and the meaning of those in transformers."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from llmcli.errors import UserError

MAX_BEAMS = 256  # llama.cpp's LLAMA_MAX_SEQ: each beam is a sequence
MAX_LENGTH_PENALTY = 10.0  # for a larger value only the length would decide
EARLY_STOPPING_MODES = ("no", "yes", "never")


class TooManyBeams(UserError):
    """Raised when a beam search needs more sequences than the model was loaded for."""

    def __init__(self, beams: int, sequences: int) -> None:
        super().__init__(
            f"{beams} beams need {beams} sequences, but this model was loaded for {sequences}",
            hint=f"use --beams {beams} when loading the model",
        )


@dataclass(frozen=True, slots=True)
class BeamSettings:
    """Settings of a beam search. One beam means no search: the answer is sampled instead.

    - `beams`: the number of candidates that are continued in parallel.
    - `length_penalty`: the exponent of the length by which a sum of log-probabilities is divided.
    - `early_stopping`: when to end the search after `beams` answers are finished. "yes": at once.
      "no": when the best unfinished answer would not beat the worst finished one if it ended at its
      present length. "never": when the best unfinished answer could not do so at any length.
    """

    beams: int = 1
    length_penalty: float = 1.0
    early_stopping: str = "no"

    def with_values(self, values: Mapping[str, Any]) -> "BeamSettings":
        """Return a copy with some settings changed. `values`: setting names and their new values as
        written by a user.

        Raises UserError for a value out of range.
        """
        parsed: dict[str, Any] = {
            name: PARSERS[name](str(value).strip()) for name, value in values.items()
        }
        return replace(self, **parsed)

    def as_dict(self) -> dict[str, float | str]:
        """Return all settings by name."""
        return {
            "beams": self.beams,
            "length_penalty": self.length_penalty,
            "early_stopping": self.early_stopping,
        }


def _parse_beams(text: str) -> int:
    """Return the number of beams in `text`. Raises UserError if it is out of range."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if not 1 <= number <= MAX_BEAMS:
        raise UserError(
            f"beams is {text[:100]!r}",
            hint=f"--beams takes a whole number from 1 to {MAX_BEAMS}; 1 means no search",
        )
    return number


def _parse_length_penalty(text: str) -> float:
    """Return the length penalty in `text`. Raises UserError if it is out of range."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not abs(number) <= MAX_LENGTH_PENALTY:
        raise UserError(
            f"length_penalty is {text[:100]!r}",
            hint=f"--length-penalty takes a number from {-MAX_LENGTH_PENALTY:g} "
            f"to {MAX_LENGTH_PENALTY:g}; above 0 favors long answers",
        )
    return number


def _parse_early_stopping(text: str) -> str:
    """Return the mode in `text` in lower case. Raises UserError if there is no such mode."""
    if text.lower() not in EARLY_STOPPING_MODES:
        raise UserError(
            f"early_stopping is {text[:100]!r}",
            hint=f"--early-stopping takes one of: {', '.join(EARLY_STOPPING_MODES)}",
        )
    return text.lower()


NO_SEARCH = BeamSettings()
PARSERS = {
    "beams": _parse_beams,
    "length_penalty": _parse_length_penalty,
    "early_stopping": _parse_early_stopping,
}
HELP = {
    "beams": (
        "1",
        f"from 1 to {MAX_BEAMS}",
        "answers kept at once; above 1 sampling does not apply",
    ),
    "length_penalty": (
        "1",
        f"from {-MAX_LENGTH_PENALTY:g} to {MAX_LENGTH_PENALTY:g}",
        "above 0 favors long answers, below 0 short ones",
    ),
    "early_stopping": (
        "no",
        ", ".join(EARLY_STOPPING_MODES),
        "stop at as many finished answers as beams",
    ),
}
