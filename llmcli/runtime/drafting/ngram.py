"""Prompt lookup: guess that the tokens that followed the last few tokens earlier follow again
(Saxena 2023).

The longer the repetition so far, the likelier it continues. This is counted whether or not anything
is drafted, so drafting starts when a text becomes repetitive and stops when it no longer pays.
"""

from collections.abc import Sequence as Tokens
from typing import ClassVar

from llmcli.runtime.drafting.base import Draft, Tools
from llmcli.runtime.requests.request import Request
from llmcli.runtime.requests.sequence import Sequence

N = 3  # tokens of a key
LONGEST = 32  # longer repetitions count as this long
# Length from which a repetition belongs to a class, and the chance at first that it continues:
# slightly below what summaries, copies and free answers of a small model showed.
CLASSES = ((0, 0.5), (4, 0.6), (5, 0.7), (7, 0.8), (10, 0.88), (15, 0.92), (22, 0.94), (32, 0.97))
KIND = tuple(sum(start <= length for start, _ in CLASSES) - 1 for length in range(LONGEST + 1))
TRUST = 6.0  # observations that the first chance counts as
DECAY = 0.98


class Lookup:
    """Drafts from the answer's own text; each answer starts without earlier statistics."""

    name: ClassVar[str] = "ngram"
    order: ClassVar[int] = 10
    draws: ClassVar[bool] = False

    @classmethod
    def made(cls, tools: Tools) -> "Lookup | None":
        """Create the drafter when repetitions are to be used."""
        return cls() if tools.ngram else None

    def start(self, request: Request, seed: int) -> "Matches":
        """Start an answer."""
        return Matches()


class Matches:
    """The lookup of one answer: the last position of each n-gram, the current repetition, and how
    often repetitions of each length continued.
    """

    def __init__(self) -> None:
        self.hits = [chance * TRUST for _, chance in CLASSES]
        self.seen = [TRUST for _ in CLASSES]
        self.tokens: Tokens[int] = ()
        # position after the last occurrence of an n-gram
        self.after: dict[tuple[int, ...], int] = {}
        self.read = 0  # tokens read
        self.source, self.length = (
            -1,
            0,
        )  # position of the token guessed next, and how many tokens before it agree

    def follow(self, sequence: Sequence) -> None:
        tokens = sequence.tokens
        if (
            tokens is not self.tokens
        ):  # the first call, and after tokens were dropped from the context
            self.tokens, self.source, self.length = tokens, -1, 0
            earlier = tokens[:-1]
            runs = zip(earlier, earlier[1:], earlier[2:], strict=False)
            self.after = dict(zip(runs, range(N, len(earlier) + 1), strict=False))
            self.read = len(earlier)
        for at in range(self.read, len(tokens)):
            self._step(tokens, at)
        self.read = len(tokens)

    def shortened(self) -> None:
        self.read, self.source, self.length = 0, -1, 0

    def _step(self, tokens: Tokens[int], at: int) -> None:
        """Read the token at `at`."""
        if self.source >= 0:
            hit = tokens[self.source] == tokens[at]
            self.went_on(self.length, hit)
            self.source, self.length = (self.source + 1, self.length + 1) if hit else (-1, 0)
        if at + 1 < N:
            return
        key = (tokens[at - 2], tokens[at - 1], tokens[at])
        if self.source < 0 and (position := self.after.get(key, -1)) >= 0:
            self.source, self.length = position, self._agreeing(tokens, position, at)
        self.after[key] = at + 1

    def _agreeing(self, tokens: Tokens[int], source: int, at: int) -> int:
        """Return how many tokens before `source` equal those that end at `at`."""
        length = N
        while (
            length < LONGEST
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
        number = KIND[min(length, LONGEST)]
        return self.hits[number] / self.seen[number]

    def went_on(self, length: int, hit: bool) -> None:
        """Record whether a repetition of `length` tokens continued."""
        number = KIND[min(length, LONGEST)]
        self.hits[number] = self.hits[number] * DECAY + hit
        self.seen[number] = self.seen[number] * DECAY + 1

    def cost(self, count: int) -> float:
        return 0.0

    def reading(self) -> float:
        return 0.0

    def draft(self, count: int) -> Draft:
        """Return the tokens at the source; beyond the end of the text, the guesses themselves are
        repeated.
        """
        guesses: list[int] = []
        end = len(self.tokens)
        for position in range(self.source, self.source + count):
            guesses.append(self.tokens[position] if position < end else guesses[position - end])
        return Draft(guesses)

    def judged(self, drafted: int, accepted: int) -> None:
        """Do nothing: `follow` reads every token."""

    def close(self) -> None:
        """Do nothing: no resources are used."""


DRAFTERS = (Lookup,)
