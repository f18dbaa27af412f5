"""What a drafter is: it guesses the tokens that follow, and tells how sure it is of them."""

from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from llmcli.runtime.request import Request
from llmcli.runtime.sequence import Sequence

Odds = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Draft:
    """Guessed tokens in order. `odds`: the distribution [n_vocab] that each was drawn from; None: none was drawn."""

    tokens: list[int]
    odds: list[Odds] | None = None


class Guesses(Protocol):
    """What one drafter guesses for one answer."""

    def follow(self, sequence: Sequence) -> None:
        """The answer has grown (it comes first with the prompt and a token)."""
        ...

    def chances(self, count: int) -> list[float]:
        """How likely each of the next guesses, at most `count`, is right where those before it were; empty: none."""
        ...

    def cost(self, count: int) -> float:
        """Seconds that so many guesses will take, beside the rows of the pass."""
        ...

    def draft(self, count: int) -> Draft:
        """At most `count` guesses."""
        ...

    def judged(self, drafted: int, accepted: int) -> None:
        """How many of the last guesses were computed, and how many of those the text took."""
        ...

    def close(self) -> None:
        """The answer is over."""
        ...


class Drafter(Protocol):
    """Alive as long as the model is loaded; what it learns of one answer serves the next."""

    name: ClassVar[str]

    def start(self, request: Request, seed: int) -> Guesses: ...
