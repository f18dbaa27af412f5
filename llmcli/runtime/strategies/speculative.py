"""Speculative decoding: guess what follows, compute the guesses in one pass, keep those that the
model would have said.

Exact (Leviathan et al. 2023; llama.cpp's common_sampler_sample_and_accept_n): row by row, left to
right, the request's own chain draws a token as without guesses, with the history that it would
have; the first that is not the guess stands in its place, and the cells of the guesses behind it
go. A guess that a draft model drew itself is kept as often as may be (sampling/matching.py); inside
a grammar, which changes what may be drawn, it must be drawn again like any other.

While nothing is guessed a token takes the same road as without, and one look into a table. Inside a
grammar what must come is taken from there (guided.py): the guesses that it agrees with are computed
already.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from time import perf_counter
from typing import ClassVar

from llmcli.runtime.drafting.base import Draft, Guesses
from llmcli.runtime.drafting.pace import Pace
from llmcli.runtime.request import Request
from llmcli.runtime.sampling.chain import NumpyChain, Row
from llmcli.runtime.sampling.matching import Matching
from llmcli.runtime.sequence import Sequence
from llmcli.runtime.strategies.base import NOTHING, Means
from llmcli.runtime.strategies.guided import Guided
from llmcli.types import Event, Finish


class Speculative(Guided):
    """Draws a token a pass, or several where guesses come true.

    The tokens of one pass are visible at once; each is accounted for with an equal share of the
    pass's time, of the time it took to draw them, and of the gap since the token before, so that
    times add up and percentiles compare.
    """

    name: ClassVar[str] = "speculative"

    def __init__(self, request: Request, seed: int, means: Means) -> None:
        speculation = means.speculation or NOTHING
        drawn = (
            any(drafter.draws for drafter in speculation.drafters) and not request.sampling.greedy
        )
        guessed = request
        if (
            drawn and speculation.reproducible
        ):  # then only a draw of the chain's own confirms a guess: the likeliest
            drawn, guessed = (
                False,
                replace(request, sampling=request.sampling.with_values({"temp": 0})),
            )
        super().__init__(request, seed, replace(means, native=None) if drawn else means)
        self.matching = (
            Matching(self.chain) if drawn and isinstance(self.chain, NumpyChain) else None
        )
        self.chain = self.matching or self.chain
        self.ledger = means.ledger
        self.pace = Pace(speculation.curve, speculation.most)
        self.drafters = [drafter.start(guessed, seed) for drafter in speculation.drafters]
        self.limit = math.inf if request.max_tokens is None else request.max_tokens
        self.made: tuple[Guesses, Draft, float] | None = (
            None  # who guessed, what, in how many seconds
        )
        self.drafted = self.accepted = 0
        self.cuts = True  # whether the memory can take guesses back
        # rows of the pass that is to come, without guesses: more than one where text was forced
        self.width = 0

    def accept(
        self, sequence: Sequence, rows: Iterator[Row], spent: float
    ) -> tuple[list[Event], Finish | None]:
        """Draw from the last token's row, and from the rows of the guesses as long as they come
        true.
        """
        if sequence.draft:
            events, finish = self._verify(sequence, rows, spent)
        else:
            events, finish = super().accept(sequence, rows, spent)
            if self.width == 1:
                self.pace.plain(spent)
            elif not self.width:
                self.pace.begin(sequence.prompt_seconds)
        if finish is None and self.cuts:
            self.width = len(sequence.tokens) - sequence.computed
            self._guess(sequence)
        return events, finish

    def _guess(self, sequence: Sequence) -> None:
        """Fill `sequence.draft` with what the first drafter guesses whom it pays to ask."""
        for drafter in self.drafters:
            drafter.follow(sequence)
        # The pass makes a token of its own, and ends where the engine looks for repetition, as
        # one-token passes do.
        limit = min(self.limit, sequence.look_at) - len(sequence.times) - 1
        for drafter in self.drafters:
            if count := self.pace.choose(drafter, limit):
                begun = perf_counter()
                draft = drafter.draft(count)
                sequence.draft = list(draft.tokens)
                self.made = drafter, draft, perf_counter() - begun
                return

    def _verify(
        self, sequence: Sequence, rows: Iterator[Row], spent: float
    ) -> tuple[list[Event], Finish | None]:
        """Draw from row after row until one does not say what was guessed."""
        assert self.made
        drafter, draft, drafting = self.made
        guessed, sequence.draft = sequence.draft, []  # the engine may have cut it
        read = list(islice(rows, len(guessed) + 1))
        start, since = len(sequence.tokens), sequence.last
        events: list[Event] = []
        right = 0
        while True:
            at, before = right, len(sequence.tokens)
            if self.matching and draft.odds and at < len(guessed):
                self.matching.expected = guessed[at], draft.odds[at]
            more, finish = super().accept(sequence, iter((read[at],)), 0.0)
            events += more
            said = sequence.tokens[before:]
            agreed = _common(said, guessed[at:])
            right += agreed
            if finish is not None or agreed < len(said) or at == len(guessed):
                break
        self._take_back(sequence, start + right)
        self.drafted += len(guessed)
        self.accepted += right
        drafter.judged(len(guessed), right)
        self.pace.guessed(
            len(guessed) + self.width, max(1, len(events)), spent, drafting, draft.reading
        )
        return _shared(sequence, events, since, spent), finish

    def _take_back(self, sequence: Sequence, keep: int) -> None:
        """Drop the cells of wrong guesses. A memory that cannot is computed anew, and nothing more
        is guessed.
        """
        sequence.computed = self.ledger.trim(sequence.slot, keep)
        self.cuts = sequence.computed == keep

    def shortened(self, sequence: Sequence) -> None:
        """Places in the text have changed: guesses begin anew."""
        super().shortened(sequence)
        sequence.draft, self.width = [], 0
        for drafter in self.drafters:
            drafter.shortened()

    def finish(self, sequence: Sequence, finish: Finish) -> str:
        """As Plain's; and how many tokens were guessed, and came true."""
        sequence.drafted, sequence.accepted = self.drafted, self.accepted
        for drafter in self.drafters:
            drafter.close()
        return super().finish(sequence, finish)


def _common(said: list[int], guessed: list[int]) -> int:
    for index, (one, other) in enumerate(zip(said, guessed, strict=False)):
        if one != other:
            return index
    return min(len(said), len(guessed))


def _shared(sequence: Sequence, events: list[Event], since: float, spent: float) -> list[Event]:
    """The events of one pass with equal shares of its times, and of those in the grammar."""
    rows = [event.token for event in events if event.token]
    if not rows:
        return events
    count = len(rows)
    gap, decode = (sequence.last - since) * 1e3 / count, spent * 1e3 / count
    sample, grammar = (
        sum(getattr(row, part) for row in rows) / count for part in ("sample_ms", "constraint_ms")
    )
    fair = [
        replace(row, ms=gap, decode_ms=decode, sample_ms=sample, constraint_ms=grammar)
        for row in rows
    ]
    sequence.times[-count:] = fair
    left = iter(fair)
    return [replace(event, token=next(left)) if event.token else event for event in events]


STRATEGIES = (Speculative,)
