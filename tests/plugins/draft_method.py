"""Draft that the last token is repeated."""

from typing import ClassVar

from llmcli.runtime.drafting.base import Draft, DrafterResources
from llmcli.runtime.requests.request import Request
from llmcli.runtime.requests.sequence import Sequence

CHANCE = 0.2  # that a token is repeated


class Repeat:
    """A drafter for --ngram-draft; the order puts it after the other drafters."""

    name: ClassVar[str] = "repeat"
    order: ClassVar[int] = 90
    draws: ClassVar[bool] = False

    @classmethod
    def create(cls, resources: DrafterResources) -> "Repeat | None":
        """Return a drafter, or None where it is not used."""
        return cls() if resources.uses_ngrams else None

    def start(self, request: Request, seed: int) -> "RepeatDrafts":
        """Return the drafts of one answer."""
        return RepeatDrafts()


class RepeatDrafts:
    """The drafts of one answer."""

    def __init__(self) -> None:
        self.token = -1

    def follow(self, sequence: Sequence) -> None:
        """Read the tokens that the answer has gained."""
        self.token = sequence.tokens[-1]

    def on_context_shift(self) -> None:
        """Do nothing: only the last token matters."""

    def chances(self, count: int) -> list[float]:
        """Return the chance of each draft to be right."""
        return [CHANCE] * count

    def cost_seconds(self, count: int) -> float:
        """Return the seconds that drafting takes."""
        return 0.0

    def reading_seconds(self) -> float:
        """Return the seconds that reading the text takes first."""
        return 0.0

    def draft(self, count: int) -> Draft:
        """Return at most `count` tokens."""
        return Draft([self.token] * count)

    def record_result(self, drafted: int, accepted: int) -> None:
        """Do nothing: the chance is fixed."""

    def close(self) -> None:
        """Do nothing: nothing is open."""


DRAFTERS = (Repeat,)
