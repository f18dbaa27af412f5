"""What a drafter is: it guesses the tokens that follow, and tells how sure it is of them."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from llmcli.runtime.request import Request
from llmcli.runtime.sampling.base import Words
from llmcli.runtime.sequence import Sequence

if TYPE_CHECKING:  # they know drafters
    from llmcli.runtime.binding.context import Context
    from llmcli.runtime.drafting.curve import Curve

Odds = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Draft:
    """Guessed tokens in order. `odds`: the distribution [n_vocab] that each was drawn from; None:
    none was drawn. `reading`: seconds that went into the text before them.
    """

    tokens: list[int]
    odds: list[Odds] | None = None
    reading: float = 0.0


class Guesses(Protocol):
    """What one drafter guesses for one answer."""

    def follow(self, sequence: Sequence) -> None:
        """The answer has grown (it comes first with the prompt and a token)."""
        ...

    def shortened(self) -> None:
        """Tokens have left the text that was followed."""
        ...

    def chances(self, count: int) -> list[float]:
        """How likely each of the next guesses, at most `count`, is right where those before it
        were; empty: none.
        """
        ...

    def cost(self, count: int) -> float:
        """Seconds that so many guesses will take, beside the rows of the pass."""
        ...

    def reading(self) -> float:
        """Seconds that it will first take to read the text so far."""
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


@dataclass(frozen=True, slots=True)
class Tools:
    """What drafters are made with: whether repetitions are to be used, the draft model's context
    and what its passes cost, the vocabulary.
    """

    ngram: bool
    draft: "tuple[Context, Curve] | None"
    words: Words


class Drafter(Protocol):
    """Alive as long as the model is loaded. `order`: who is asked first;
    `draws`: whether its guesses are drawn from distributions that it tells."""

    name: ClassVar[str]
    order: ClassVar[int]
    draws: ClassVar[bool]

    @classmethod
    def made(cls, tools: Tools) -> "Drafter | None":
        """One of these, where it is wanted."""
        ...

    def start(self, request: Request, seed: int) -> Guesses: ...
