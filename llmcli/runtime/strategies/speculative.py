"""Speculative decoding: guess the next tokens, compute them in one pass, and keep those that the
model would have generated.

The result is exact (Leviathan et al. 2023; llama.cpp's common_sampler_sample_and_accept_n). Row by
row, the request's own chain draws a token, as it would without guesses. The first drawn token that
differs from its guess replaces the guess, and the cells of later guesses are dropped. If a draft
model drew a guess from a known distribution, the guess is kept as often as possible
(sampling/rejection.py). Inside a grammar, which changes the distribution, such a guess is treated
like any other.

Without a draft, a token takes the same path as in plain decoding, plus one table lookup. Inside a
grammar forced text is inserted first (guided.py); guesses that agree with it are computed already.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from time import perf_counter
from typing import ClassVar

from llmcli.runtime.drafting.base import Draft, DraftState
from llmcli.runtime.drafting.draft_length import DraftLength
from llmcli.runtime.kv_cache.common_prefix import common_prefix
from llmcli.runtime.requests.request import Request
from llmcli.runtime.requests.sequence import Sequence
from llmcli.runtime.sampling.chain import NumpyChain, RowLogits
from llmcli.runtime.sampling.rejection import RejectionChain
from llmcli.runtime.strategies.base import NO_SPECULATION, StrategyResources
from llmcli.runtime.strategies.guided import GuidedStrategy
from llmcli.types import Event, Finish


class SpeculativeStrategy(GuidedStrategy):
    """Draws one token per pass, or several when guesses are right.

    The tokens of a pass become visible together. Each gets an equal share of the time of the pass,
    of the sampling time and of the gap since the previous token, so that times add up and
    percentiles are comparable.
    """

    name: ClassVar[str] = "speculative"

    def __init__(self, request: Request, seed: int, resources: StrategyResources) -> None:
        speculation = resources.speculation or NO_SPECULATION
        uses_draws = (
            any(drafter.draws for drafter in speculation.drafters)
            and not request.sampling.is_greedy
        )
        draft_request = request
        if (
            uses_draws and speculation.is_reproducible
            # in reproducible mode only the chain's own draw may confirm a guess, so the drafters
            # guess the likeliest token
        ):
            uses_draws, draft_request = (
                False,
                replace(request, sampling=request.sampling.with_values({"temp": 0})),
            )
        super().__init__(
            request, seed, replace(resources, native=None) if uses_draws else resources
        )
        self.rejection_chain = (
            RejectionChain(self.chain)
            if uses_draws and isinstance(self.chain, NumpyChain)
            else None
        )
        self.chain = self.rejection_chain or self.chain
        self.ledger = resources.ledger
        self.draft_length = DraftLength(speculation.pass_cost, speculation.max_rows)
        self.drafters = [drafter.start(draft_request, seed) for drafter in speculation.drafters]
        self.limit = math.inf if request.max_tokens is None else request.max_tokens
        self.last_draft: tuple[DraftState, Draft, float] | None = (
            None  # the drafter's state, its draft, and the seconds spent on it
        )
        self.n_drafted = self.n_accepted = 0
        self.can_cut = True  # whether the memory can drop guesses
        # rows of the next pass besides the guesses; more than one after forced text
        self.pass_rows = 0

    def accept(
        self, sequence: Sequence, rows: Iterator[RowLogits], pass_seconds: float
    ) -> tuple[list[Event], Finish | None]:
        """Draw from the row of the last token, and then from the row of each guess until a guess is
        wrong.
        """
        if sequence.draft:
            events, finish = self._verify(sequence, rows, pass_seconds)
        else:
            events, finish = super().accept(sequence, rows, pass_seconds)
            if self.pass_rows == 1:
                self.draft_length.record_single(pass_seconds)
            elif not self.pass_rows:
                self.draft_length.record_prompt(sequence.accounting.prompt_seconds)
        if finish is None and self.can_cut:
            self.pass_rows = len(sequence.tokens) - sequence.n_computed
            self._guess(sequence)
        return events, finish

    def _guess(self, sequence: Sequence) -> None:
        """Fill `sequence.draft` with the guesses of the first drafter whose guesses pay."""
        for drafter in self.drafters:
            drafter.follow(sequence)
        # A pass also yields one token without a guess. It ends at the token where the engine checks
        # for repetition, so that the check sees the same text as without drafting.
        limit = min(self.limit, sequence.repetition_check_at) - len(sequence.times) - 1
        for drafter in self.drafters:
            if count := self.draft_length.choose(drafter, limit):
                begun = perf_counter()
                draft = drafter.draft(count)
                sequence.draft = list(draft.tokens)
                self.last_draft = drafter, draft, perf_counter() - begun
                return

    def _verify(
        self, sequence: Sequence, rows: Iterator[RowLogits], spent: float
    ) -> tuple[list[Event], Finish | None]:
        """Draw from row after row until a token differs from its guess."""
        assert self.last_draft
        drafter, draft, drafting = self.last_draft
        guessed, sequence.draft = sequence.draft, []  # the engine may have shortened the draft
        read_rows = list(islice(rows, len(guessed) + 1))
        start, since = len(sequence.tokens), sequence.last_token_time
        events: list[Event] = []
        n_right = 0
        while True:
            at, length = n_right, len(sequence.tokens)
            if self.rejection_chain and draft.probabilities and at < len(guessed):
                self.rejection_chain.expected = guessed[at], draft.probabilities[at]
            new_events, finish = super().accept(sequence, iter((read_rows[at],)), 0.0)
            events += new_events
            new_tokens = sequence.tokens[length:]
            agreed = common_prefix(new_tokens, guessed[at:])
            n_right += agreed
            if finish is not None or agreed < len(new_tokens) or at == len(guessed):
                break
        self._take_back(sequence, start + n_right)
        self.n_drafted += len(guessed)
        self.n_accepted += n_right
        drafter.record_result(len(guessed), n_right)
        self.draft_length.record_draft(
            len(guessed) + self.pass_rows,
            max(1, len(events)),
            spent,
            drafting,
            draft.reading_seconds,
        )
        return _shared(sequence, events, since, spent), finish

    def _take_back(self, sequence: Sequence, keep: int) -> None:
        """Drop the cells of wrong guesses. If the memory cannot drop them, the text is recomputed
        and drafting stops.
        """
        sequence.n_computed = self.ledger.trim(sequence.slot, keep)
        self.can_cut = sequence.n_computed == keep

    def on_context_shift(self, sequence: Sequence) -> None:
        """Restart the drafters: positions in the text have changed."""
        super().on_context_shift(sequence)
        sequence.draft, self.pass_rows = [], 0
        for drafter in self.drafters:
            drafter.on_context_shift()

    def finish(self, sequence: Sequence, finish: Finish) -> str:
        """Return the text that was held back, and record how many tokens were drafted and accepted."""
        sequence.accounting.n_drafted, sequence.accounting.n_accepted = (
            self.n_drafted,
            self.n_accepted,
        )
        for drafter in self.drafters:
            drafter.close()
        return super().finish(sequence, finish)


def _shared(sequence: Sequence, events: list[Event], since: float, spent: float) -> list[Event]:
    """Return the events of one pass, each with an equal share of the pass's times, including the
    time in the grammar.
    """
    rows = [event.token for event in events if event.token]
    if not rows:
        return events
    count = len(rows)
    gap, decode = (sequence.last_token_time - since) * 1e3 / count, spent * 1e3 / count
    sample, grammar = (
        sum(getattr(row, field) for row in rows) / count for field in ("sample_ms", "constraint_ms")
    )
    equal = [
        replace(row, ms=gap, decode_ms=decode, sample_ms=sample, constraint_ms=grammar)
        for row in rows
    ]
    sequence.times[-count:] = equal
    tokens = iter(equal)
    return [replace(event, token=next(tokens)) if event.token else event for event in events]


STRATEGIES = (SpeculativeStrategy,)
