"""A draft method that guesses that the last token is repeated."""

from collections.abc import Sequence as Tokens
from typing import ClassVar

from llmcli.runtime.drafting.base import Draft, DrafterResources
from llmcli.runtime.drafting.gain.tree_shape import ShapeLimits, TreeShape, chain_shape
from llmcli.runtime.requests.request import Request
from llmcli.runtime.requests.sequence import Sequence

CHANCE = 0.2  # estimated probability that a token is repeated


class Repeat:
    """A drafter for --ngram-draft. By its `order`, it comes after the others of equal gain."""

    name: ClassVar[str] = "repeat"
    order: ClassVar[int] = 90
    draws: ClassVar[bool] = False

    @classmethod
    def create(cls, resources: DrafterResources) -> "Repeat | None":
        """Return a drafter, or None if the settings do not use it."""
        return cls() if resources.uses_ngrams else None

    def start(self, request: Request, seed: int) -> "RepeatDrafts":
        """Return the drafts for a new answer."""
        return RepeatDrafts()


class RepeatDrafts:
    """The drafts of one answer."""

    def __init__(self) -> None:
        self.token = -1

    def follow(self, sequence: Sequence) -> None:
        """Read the tokens that are new in the answer."""
        self.token = sequence.tokens[-1]

    def on_context_shift(self) -> None:
        """Do nothing, because only the last token matters."""

    def shape(self, limits: ShapeLimits) -> TreeShape:
        """Return a single path, as long as possible, whose tokens have an equal chance."""
        return chain_shape([CHANCE] * limits.chain_length)

    def cost_seconds(self, n_depths: int) -> float:
        """Return the seconds to draft `n_depths` tokens."""
        return 0.0

    def reading_seconds(self) -> float:
        """Return the seconds to read new text before drafting."""
        return 0.0

    def draft(self, shape: TreeShape) -> Draft:
        """Return a draft with the nodes of `shape`."""
        return Draft.chain([self.token] * len(shape))

    def record_result(self, draft: Draft, tokens: Tokens[int]) -> None:
        """Do nothing, because the probability is fixed."""

    def close(self, tokens: Tokens[int]) -> None:
        """Do nothing, because no resources are open."""


DRAFTERS = (Repeat,)
