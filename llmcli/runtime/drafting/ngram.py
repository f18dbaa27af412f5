"""Prompt lookup: if the last few tokens occurred earlier in the text, guess that they are followed
by the same tokens as then (Saxena 2023).

The longer such a repetition is, the likelier it continues. How often repetitions continue is
counted even when nothing is drafted. So drafting starts when a text becomes repetitive, and stops
when it no longer saves time.
"""

from collections.abc import Sequence as Tokens
from typing import ClassVar

from llmcli.runtime.drafting.base import Draft, DrafterResources
from llmcli.runtime.drafting.gain.tree_shape import ShapeLimits, TreeShape, chain_shape
from llmcli.runtime.requests.request import Request
from llmcli.runtime.requests.sequence import Sequence

INDEX_TOKENS = 2048  # tokens of a long prompt that are indexed for each token of the answer
NGRAM_TOKENS = 3  # number of last tokens that are looked up in the earlier text
MAX_LENGTH = 32  # longer repetitions count as this long
# Classes of repetitions by length. Each entry is the smallest length of the class, and the initial
# chance that such a repetition continues.
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
OBSERVATION_DECAY = 0.98  # factor of the earlier counts for each observation


class PromptLookup:
    """A drafter that guesses from repetitions in prompt and answer. Every answer has separate
    statistics.
    """

    name: ClassVar[str] = "ngram"
    order: ClassVar[int] = 10
    draws: ClassVar[bool] = False
    failure: ClassVar[None] = None

    @classmethod
    def create(cls, resources: DrafterResources) -> "PromptLookup | None":
        """Create the drafter. Return None when drafting from repetitions is turned off."""
        return cls() if resources.uses_ngrams else None

    def start(self, request: Request, seed: int) -> "NgramDrafts":
        """Return the state for a new answer."""
        return NgramDrafts()


class NgramDrafts:
    """The state of prompt lookup for one answer: the latest position of each n-gram, the current
    repetition, and statistics of how often repetitions of each length continued.
    """

    def __init__(self) -> None:
        self.hits = [chance * INITIAL_WEIGHT for _, chance in LENGTH_CLASSES]
        self.tries = [INITIAL_WEIGHT for _ in LENGTH_CLASSES]
        self.tokens: Tokens[int] = ()
        # The position after the latest occurrence of each n-gram. The prompt is indexed piece by
        # piece from its end, so that the first token of an answer does not wait for all of it.
        self.position_after: dict[tuple[int, ...], int] = {}
        self.n_unindexed = 0  # tokens at the beginning of the prompt that are not indexed
        self.n_read = 0  # number of tokens read
        # the current repetition: the position of the earlier token that is guessed next (-1 for no
        # repetition), and how many tokens before it equal the end of the text
        self.source, self.length = -1, 0

    def follow(self, sequence: Sequence) -> None:
        tokens = sequence.tokens
        # the first call, or the list was replaced because tokens were dropped from the context
        if tokens is not self.tokens:
            self.tokens, self.source, self.length = tokens, -1, 0
            self.position_after = {}
            self.n_read = self.n_unindexed = len(tokens) - 1
        if self.n_unindexed >= NGRAM_TOKENS:
            self._index_more(tokens)
        for index in range(self.n_read, len(tokens)):
            self._read_token(tokens, index)
        self.n_read = len(tokens)

    def on_context_shift(self) -> None:
        """Do nothing, because `follow` reads the new list of tokens from its beginning."""

    def _index_more(self, tokens: Tokens[int]) -> None:
        """Index the last INDEX_TOKENS of the tokens that are not indexed yet."""
        end = self.n_unindexed
        start = max(0, end - INDEX_TOKENS)
        piece = tokens[start:end]
        runs = zip(piece, piece[1:], piece[2:], strict=False)
        latest = dict(zip(runs, range(start + NGRAM_TOKENS, end + 1), strict=False))
        for ngram, position in latest.items():
            self.position_after.setdefault(ngram, position)
        # the n-grams at the border are those of the next piece
        self.n_unindexed = start + NGRAM_TOKENS - 1 if start else 0

    def _read_token(self, tokens: Tokens[int], index: int) -> None:
        """Read the token at `index`: check whether it continues the current repetition, otherwise
        search a new one, and store the n-gram that ends here.
        """
        if self.source >= 0:
            hit = tokens[self.source] == tokens[index]
            self.record_continuation(self.length, hit)
            self.source, self.length = (self.source + 1, self.length + 1) if hit else (-1, 0)
        if index + 1 < NGRAM_TOKENS:
            return
        key = (tokens[index - 2], tokens[index - 1], tokens[index])
        if self.source < 0 and (position := self.position_after.get(key, -1)) >= 0:
            self.source, self.length = position, self._count_matching(tokens, position, index)
        self.position_after[key] = index + 1

    def _count_matching(self, tokens: Tokens[int], source: int, index: int) -> int:
        """Return how many tokens directly before position `source` equal the last tokens up to and
        including `index`, at most MAX_LENGTH.
        """
        length = NGRAM_TOKENS
        while (
            length < MAX_LENGTH
            and length < source
            and tokens[source - 1 - length] == tokens[index - length]
        ):
            length += 1
        return length

    def shape(self, limits: ShapeLimits) -> TreeShape:
        if self.source < 0:
            return TreeShape()
        return chain_shape(
            [self.chance(self.length + offset) for offset in range(limits.chain_length)]
        )

    def chance(self, length: int) -> float:
        """Return the estimated probability that a repetition of `length` tokens continues."""
        number = CLASS_OF_LENGTH[min(length, MAX_LENGTH)]
        return self.hits[number] / self.tries[number]

    def record_continuation(self, length: int, hit: bool) -> None:
        """Record whether a repetition of `length` tokens continued with the next token (`hit`)."""
        number = CLASS_OF_LENGTH[min(length, MAX_LENGTH)]
        self.hits[number] = self.hits[number] * OBSERVATION_DECAY + hit
        self.tries[number] = self.tries[number] * OBSERVATION_DECAY + 1

    def cost_seconds(self, n_depths: int) -> float:
        return 0.0

    def reading_seconds(self) -> float:
        return 0.0

    def draft(self, shape: TreeShape) -> Draft:
        """Return the tokens that followed in the earlier text. If the text ends before, the guesses
        are continued with themselves.
        """
        guesses: list[int] = []
        end = len(self.tokens)
        for position in range(self.source, self.source + len(shape)):
            guesses.append(self.tokens[position] if position < end else guesses[position - end])
        return Draft.chain(guesses)

    def record_result(self, draft: Draft, tokens: Tokens[int]) -> None:
        """Do nothing, because `follow` already counts whether each token continued the
        repetition.
        """

    def close(self, tokens: Tokens[int]) -> None:
        """Do nothing, because there are no resources to free."""


DRAFTERS = (PromptLookup,)
