"""Prompt lookup: where the last tokens stood before, what followed them then is guessed to follow
now (Saxena 2023).

How long the repetition already is tells how likely it goes on; that is counted whether or not
anything is guessed, so that guessing starts when a text turns repetitive and stops when it no
longer pays.
"""

from collections.abc import Sequence as Tokens
from typing import ClassVar

from llmcli.runtime.drafting.base import Draft, Tools
from llmcli.runtime.request import Request
from llmcli.runtime.sequence import Sequence

N = 3  # tokens of a key
LONGEST = 32  # repetitions beyond are all alike
# From this length on a repetition counts to the class, whose chance is at first taken to be this:
# what a small model's summaries, copies and free answers showed, rather less than more.
CLASSES = ((0, 0.5), (4, 0.6), (5, 0.7), (7, 0.8), (10, 0.88), (15, 0.92), (22, 0.94), (32, 0.97))
KIND = tuple(sum(start <= length for start, _ in CLASSES) - 1 for length in range(LONGEST + 1))
TRUST = 6.0  # observations that the first guess at a chance is worth
DECAY = 0.98


class Lookup:
    """Begins each answer anew: one copies, the next does not."""

    name: ClassVar[str] = "ngram"
    order: ClassVar[int] = 10
    draws: ClassVar[bool] = False

    @classmethod
    def made(cls, tools: Tools) -> "Lookup | None":
        """Where repetitions are to be used."""
        return cls() if tools.ngram else None

    def start(self, request: Request, seed: int) -> "Matches":
        """A new answer."""
        return Matches()


class Matches:
    """One answer: where each run of N tokens was seen last, the repetition that is going on, and
    how often those of its length went on.
    """

    def __init__(self) -> None:
        self.hits = [chance * TRUST for _, chance in CLASSES]
        self.seen = [TRUST for _ in CLASSES]
        self.tokens: Tokens[int] = ()
        self.after: dict[tuple[int, ...], int] = {}  # the place behind the last occurrence
        self.read = 0  # tokens known
        self.source, self.length = (
            -1,
            0,
        )  # the token guessed next stands at `source`; so many before it agree

    def follow(self, sequence: Sequence) -> None:
        tokens = sequence.tokens
        if (
            tokens is not self.tokens
        ):  # the first time, and where some of them have left the context
            self.tokens, self.source, self.length = tokens, -1, 0
            known = tokens[:-1]
            runs = zip(known, known[1:], known[2:], strict=False)
            self.after = dict(zip(runs, range(N, len(known) + 1), strict=False))
            self.read = len(known)
        for at in range(self.read, len(tokens)):
            self._step(tokens, at)
        self.read = len(tokens)

    def shortened(self) -> None:
        self.read, self.source, self.length = 0, -1, 0

    def _step(self, tokens: Tokens[int], at: int) -> None:
        """The token at `at` is known now."""
        if self.source >= 0:
            hit = tokens[self.source] == tokens[at]
            self.went_on(self.length, hit)
            self.source, self.length = (self.source + 1, self.length + 1) if hit else (-1, 0)
        if at + 1 < N:
            return
        key = (tokens[at - 2], tokens[at - 1], tokens[at])
        if self.source < 0 and (found := self.after.get(key, -1)) >= 0:
            self.source, self.length = found, self._agreeing(tokens, found, at)
        self.after[key] = at + 1

    def _agreeing(self, tokens: Tokens[int], source: int, at: int) -> int:
        """How many tokens before `source` are those that end at `at`."""
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
        """How likely a repetition of `length` tokens goes on by one more."""
        kind = KIND[min(length, LONGEST)]
        return self.hits[kind] / self.seen[kind]

    def went_on(self, length: int, hit: bool) -> None:
        """A repetition of `length` tokens did, or did not, go on."""
        kind = KIND[min(length, LONGEST)]
        self.hits[kind] = self.hits[kind] * DECAY + hit
        self.seen[kind] = self.seen[kind] * DECAY + 1

    def cost(self, count: int) -> float:
        return 0.0

    def reading(self) -> float:
        return 0.0

    def draft(self, count: int) -> Draft:
        """What stands at the source; where that runs into the text's end, what was guessed goes on
        it.
        """
        out: list[int] = []
        end = len(self.tokens)
        for place in range(self.source, self.source + count):
            out.append(self.tokens[place] if place < end else out[place - end])
        return Draft(out)

    def judged(self, drafted: int, accepted: int) -> None:
        """Nothing: `follow` sees every token."""

    def close(self) -> None:
        """Nothing is held."""


DRAFTERS = (Lookup,)
