"""What a drafter is: it guesses the next tokens and estimates how likely they are right."""

from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from llmcli.runtime.binding.context import Context
from llmcli.runtime.drafting.pass_cost import PassCost
from llmcli.runtime.requests.request import Request
from llmcli.runtime.requests.sequence import Sequence
from llmcli.runtime.vocabulary import Vocabulary

Probabilities = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Draft:
    """Guessed tokens in order. `probabilities`: the distribution `[n_vocab]` that each was drawn
    from, or None. `reading_seconds`: seconds spent reading the text before them.
    """

    tokens: list[int]
    probabilities: list[Probabilities] | None = None
    reading_seconds: float = 0.0


class DraftState(Protocol):
    """The guesses of one drafter for one answer."""

    def follow(self, sequence: Sequence) -> None:
        """Read the tokens that were added to the answer; the first call comes after the prompt and
        one token.
        """
        ...

    def on_context_shift(self) -> None:
        """Handle tokens that were dropped from the text."""
        ...

    def chances(self, count: int) -> list[float]:
        """Return for each of the next guesses, at most `count`, how likely it is right if those
        before it are; empty when there are none.
        """
        ...

    def cost_seconds(self, count: int) -> float:
        """Return the seconds that this many guesses will take, besides the rows of the pass."""
        ...

    def reading_seconds(self) -> float:
        """Return the seconds that reading the text so far will take first."""
        ...

    def draft(self, count: int) -> Draft:
        """Return at most `count` guesses."""
        ...

    def record_result(self, drafted: int, accepted: int) -> None:
        """Record how many of the last guesses were computed, and how many were accepted."""
        ...

    def close(self) -> None:
        """Release everything at the end of the answer."""
        ...


@dataclass(frozen=True, slots=True)
class DrafterResources:
    """What drafters are created with: whether to use repetitions, the draft model's context with
    the cost of its passes, and the vocabulary.
    """

    uses_ngrams: bool
    draft_model: tuple[Context, PassCost] | None
    vocabulary: Vocabulary


class Drafter(Protocol):
    """A way to guess tokens; it exists as long as the model is loaded. `order`: the lowest is asked
    first. `draws`: whether its guesses are drawn from distributions that it reports.
    """

    name: ClassVar[str]
    order: ClassVar[int]
    draws: ClassVar[bool]

    @classmethod
    def create(cls, resources: DrafterResources) -> "Drafter | None":
        """Create the drafter, or return None when it is not wanted."""
        ...

    def start(self, request: Request, seed: int) -> DraftState: ...
