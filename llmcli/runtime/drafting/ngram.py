"""Prompt lookup: when the last few tokens occurred earlier, guess that the tokens that followed
then follow again (Saxena 2023).

The longer a repetition is, the likelier it continues. How often repetitions continue is counted
even when nothing is drafted, so drafting starts when a text becomes repetitive and stops when it no
longer pays.
"""

from collections.abc import Sequence as Tokens
from typing import ClassVar

from llmcli.runtime.drafting.base import Draft, DrafterResources
from llmcli.runtime.requests.request import Request
from llmcli.runtime.requests.sequence import Sequence

NGRAM_TOKENS = 3  # number of tokens that are looked up
MAX_LENGTH = 32  # longer repetitions count as this long
# Each entry is the length from which a repetition belongs to a class, and the initial chance that
# such a repetition continues. The chances are slightly below those measured in summaries, copies
# and free answers of a small model.
LENGTH_CLASSES = (
    (0, 0.5),
    (4, 0.6),
    (5, 0.7),
    (7, 0.8),
    (10, 0.88),
    (15, 0.92),
    (22, 0.94),
    (32, 0.97),
)
CLASS_OF_LENGTH = tuple(
    sum(start <= length for start, _ in LENGTH_CLASSES) - 1 for length in range(MAX_LENGTH + 1)
)
INITIAL_WEIGHT = 6.0  # number of observations that an initial chance counts as
OBSERVATION_DECAY = 0.98


class PromptLookup:
    """Drafts from the text of prompt and answer. Statistics are not kept from one answer to the
    next.
    """

    name: ClassVar[str] = "ngram"
    order: ClassVar[int] = 10
    draws: ClassVar[bool] = False

    @classmethod
    def create(cls, resources: DrafterResources) -> "PromptLookup | None":
        """Create the drafter, or return None when repetitions are not to be used."""
        return cls() if resources.uses_ngrams else None

    def start(self, request: Request, seed: int) -> "NgramDrafts":
        """Return the drafts for a new answer."""
        return NgramDrafts()


class NgramDrafts:
    """The lookup of one answer: the last position of each n-gram, the current repetition, and how
    often repetitions of each length continued.
    """

    def __init__(self) -> None:
        self.hits = [chance * INITIAL_WEIGHT for _, chance in LENGTH_CLASSES]
        self.tries = [INITIAL_WEIGHT for _ in LENGTH_CLASSES]
        self.tokens: Tokens[int] = ()
        # the position after the latest occurrence of each n-gram
        self.position_after: dict[tuple[int, ...], int] = {}
        self.n_read = 0  # number of tokens read
        self.source, self.length = (
            -1,
            0,
            # position of the earlier token that is guessed next, and how many tokens before it agree
            # with the end of the text
        )

    def follow(self, sequence: Sequence) -> None:
        tokens = sequence.tokens
        if (
            tokens is not self.tokens
        ):  # this is the first call, or tokens were dropped from the context
            self.tokens, self.source, self.length = tokens, -1, 0
            earlier = tokens[:-1]
            runs = zip(earlier, earlier[1:], earlier[2:], strict=False)
            self.position_after = dict(
                zip(runs, range(NGRAM_TOKENS, len(earlier) + 1), strict=False)
            )
            self.n_read = len(earlier)
        for at in range(self.n_read, len(tokens)):
            self._step(tokens, at)
        self.n_read = len(tokens)

    def on_context_shift(self) -> None:
        self.n_read, self.source, self.length = 0, -1, 0

    def _step(self, tokens: Tokens[int], at: int) -> None:
        """Read the token at `at`."""
        if self.source >= 0:
            hit = tokens[self.source] == tokens[at]
            self.record_continuation(self.length, hit)
            self.source, self.length = (self.source + 1, self.length + 1) if hit else (-1, 0)
        if at + 1 < NGRAM_TOKENS:
            return
        key = (tokens[at - 2], tokens[at - 1], tokens[at])
        if self.source < 0 and (position := self.position_after.get(key, -1)) >= 0:
            self.source, self.length = position, self._agreeing(tokens, position, at)
        self.position_after[key] = at + 1

    def _agreeing(self, tokens: Tokens[int], source: int, at: int) -> int:
        """Return how many tokens directly before `source` equal the last tokens up to `at`, counted
        up to MAX_LENGTH.
        """
        length = NGRAM_TOKENS
        while (
            length < MAX_LENGTH
            and length < source
            and tokens[source - 1 - length] == tokens[at - length]
        ):
            length += 1
        return length

    def chances(self, count: int) -> list[float]:
        if self.source < 0:
            return []
        return [self.chance(self.length + ahead) for ahead in range(count)]

    def chance(self, length: int) -> float:
        """Return how likely a repetition of `length` tokens continues."""
        number = CLASS_OF_LENGTH[min(length, MAX_LENGTH)]
        return self.hits[number] / self.tries[number]

    def record_continuation(self, length: int, hit: bool) -> None:
        """Record whether a repetition of `length` tokens continued (`hit`)."""
        number = CLASS_OF_LENGTH[min(length, MAX_LENGTH)]
        self.hits[number] = self.hits[number] * OBSERVATION_DECAY + hit
        self.tries[number] = self.tries[number] * OBSERVATION_DECAY + 1

    def cost_seconds(self, count: int) -> float:
        return 0.0

    def reading_seconds(self) -> float:
        return 0.0

    def draft(self, count: int) -> Draft:
        """Return the tokens that followed earlier, beginning at the source. After the end of the
        text, the guesses themselves are repeated.
        """
        guesses: list[int] = []
        end = len(self.tokens)
        for position in range(self.source, self.source + count):
            guesses.append(self.tokens[position] if position < end else guesses[position - end])
        return Draft(guesses)

    def record_result(self, drafted: int, accepted: int) -> None:
        """Do nothing, because `follow` counts what came of each guess."""

    def close(self) -> None:
        """Do nothing: no resources are used."""


DRAFTERS = (PromptLookup,)
