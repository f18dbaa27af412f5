"""The settings of a beam search, in transformers' words. Knows nothing of models."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from llmcli.errors import UserError

MOST = 256  # llama.cpp's LLAMA_MAX_SEQ: a beam is one of its sequences
STEEPEST = 10.0  # a penalty beyond it decides by length alone
EARLY = ("no", "yes", "never")


class TooManyBeams(UserError):
    """A search wants more sequences than a model was loaded for."""

    def __init__(self, beams: int, sequences: int) -> None:
        super().__init__(
            f"{beams} beams take {beams} sequences, and this model was loaded for {sequences}",
            hint=f"start with --beams {beams}",
        )


@dataclass(frozen=True, slots=True)
class Search:
    """How a beam search goes. One beam is no search: the sampling settings hold.

    `early_stopping` yes: stop at `beams` finished answers; no: when the best unfinished one cannot
    become better than the worst of them at its present length; never: nor at any length.
    """

    beams: int = 1
    length_penalty: float = 1.0
    early_stopping: str = "no"

    def with_values(self, values: Mapping[str, Any]) -> "Search":
        """These settings with some changed, as people write them; raises UserError for one out of
        range.
        """
        parsed: dict[str, Any] = {
            name: PARSED[name](str(value).strip()) for name, value in values.items()
        }
        return replace(self, **parsed)

    def as_dict(self) -> dict[str, float | str]:
        """Every setting and its value."""
        return {
            "beams": self.beams,
            "length_penalty": self.length_penalty,
            "early_stopping": self.early_stopping,
        }


def _beams(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = 0
    if not 1 <= number <= MOST:
        raise UserError(
            f"beams is {text!r}",
            hint=f"--beams takes a whole number from 1 to {MOST}, 1 = no search",
        )
    return number


def _penalty(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not abs(number) <= STEEPEST:
        raise UserError(
            f"length_penalty is {text!r}",
            hint=f"--length-penalty takes a number from {-STEEPEST:g} to {STEEPEST:g}; above 0 favours long answers",
        )
    return number


def _early(text: str) -> str:
    if text.lower() not in EARLY:
        raise UserError(
            f"early_stopping is {text!r}", hint=f"--early-stopping takes one of: {', '.join(EARLY)}"
        )
    return text.lower()


NO_SEARCH = Search()
PARSED = {"beams": _beams, "length_penalty": _penalty, "early_stopping": _early}
HELP = {
    "beams": (
        "1",
        f"from 1 to {MOST}",
        "answers followed at once; above 1 sampling does not apply",
    ),
    "length_penalty": (
        "1",
        f"from {-STEEPEST:g} to {STEEPEST:g}",
        "above 0 favours long answers, below 0 short ones",
    ),
    "early_stopping": ("no", ", ".join(EARLY), "stop at as many finished answers as beams"),
}
