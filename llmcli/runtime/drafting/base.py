"""The interface of drafters. A drafter guesses the next tokens and estimates how likely its guesses
are right.
"""

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
    """Guessed tokens in order. `probabilities`: for each token the distribution `[n_vocab]` that it
    was drawn from, or None if they were not drawn. `reading_seconds`: seconds spent reading the
    text before the guesses.
    """

    tokens: list[int]
    probabilities: list[Probabilities] | None = None
    reading_seconds: float = 0.0


class DraftState(Protocol):
    """The guesses of one drafter for one answer, as they are made."""

    def follow(self, sequence: Sequence) -> None:
        """Read the tokens that were added to the answer since the last call. The first call comes
        after the prompt and one token.
        """
        ...

    def on_context_shift(self) -> None:
        """Handle tokens that were dropped from the text."""
        ...

    def chances(self, count: int) -> list[float]:
        """Return the chances of the next guesses, of at most `count`: how likely each is right if
        all guesses before it are right. Empty when the drafter has no guesses.
        """
        ...

    def cost_seconds(self, count: int) -> float:
        """Return the seconds that making this many guesses will take. The rows of the pass that
        checks them are not included.
        """
        ...

    def reading_seconds(self) -> float:
        """Return the seconds that the drafter needs to read the text so far before it can guess."""
        ...

    def draft(self, count: int) -> Draft:
        """Return at most `count` guesses."""
        ...

    def record_result(self, drafted: int, accepted: int) -> None:
        """Record how many of the last guesses were computed (`drafted`), and how many of these were
        right (`accepted`).
        """
        ...

    def close(self) -> None:
        """Release all resources at the end of the answer."""
        ...


@dataclass(frozen=True, slots=True)
class DrafterResources:
    """What a drafter is created from. `uses_ngrams`: whether to guess from repetitions in the text.
    `draft_model`: the context of the draft model, and the cost of its passes.
    """

    uses_ngrams: bool
    draft_model: tuple[Context, PassCost] | None
    vocabulary: Vocabulary


class Drafter(Protocol):
    """A method to guess tokens. The object exists as long as the model is loaded. `order`: drafters
    with a lower number are asked first. `draws`: whether guesses are drawn from distributions,
    which the draft then contains.
    """

    name: ClassVar[str]
    order: ClassVar[int]
    draws: ClassVar[bool]

    @classmethod
    def create(cls, resources: DrafterResources) -> "Drafter | None":
        """Create the drafter, or return None when `resources` do not include what it needs."""
        ...

    def start(self, request: Request, seed: int) -> DraftState: ...
