"""Speculative decoding: guess the next tokens, compute them in one forward pass, and keep the
guesses that the model would have generated.

The distribution of the answer does not change (Leviathan et al. 2023; llama.cpp's
common_sampler_sample_and_accept_n). For each row of the pass, the request's sampler chain draws a
token, as it would without guesses. The first drawn token that differs from its guess replaces the
guess, and the KV cells of the later guesses are dropped. If a draft model drew the guess from a
known distribution, rejection sampling confirms it as often as possible (sampling/rejection.py).
Inside a grammar, which changes the distribution, rejection sampling is not used.

A pass without guesses costs the same as in plain decoding, plus one table lookup. Inside a grammar
the forced text is inserted first (guided.py). Guesses that agree with the forced text need no
further computation, because the pass has computed them already.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from time import perf_counter
from typing import ClassVar

from llmcli.runtime.drafting.base import Draft, DraftState, RowObserver
from llmcli.runtime.drafting.draft_length import DraftLength
from llmcli.runtime.kv_cache.common_prefix import common_prefix
from llmcli.runtime.kv_cache.context_protocols import CacheMemory
from llmcli.runtime.requests.draft_counts import DraftTally
from llmcli.runtime.requests.request import Request
from llmcli.runtime.requests.sequence import Sequence
from llmcli.runtime.sampling.chain import NumpyChain, RowLogits
from llmcli.runtime.sampling.rejection import RejectionChain
from llmcli.runtime.strategies.base import NO_SPECULATION, StrategyResources
from llmcli.runtime.strategies.guided import GuidedStrategy
from llmcli.types import Event, Finish


class SpeculativeStrategy(GuidedStrategy):
    """Adds one token per forward pass, or several when guesses are right.

    The tokens of one pass become visible together. Each is recorded with an equal share of the
    pass's time, so that the times add up and their percentiles can be compared with plain decoding.
    """

    name: ClassVar[str] = "speculative"

    def __init__(self, request: Request, seed: int, resources: StrategyResources) -> None:
        speculation = resources.speculation or NO_SPECULATION
        uses_rejection = (
            any(drafter.draws for drafter in speculation.drafters)
            and not request.sampling.is_greedy
        )
        draft_request = request
        if uses_rejection and speculation.is_reproducible:
            # Only the chain's own draw may confirm a guess, so the drafters guess the likeliest
            # token.
            uses_rejection, draft_request = (
                False,
                replace(request, sampling=request.sampling.with_values({"temp": 0})),
            )
        super().__init__(
            request, seed, replace(resources, native=None) if uses_rejection else resources
        )
        self.rejection_chain = (
            RejectionChain(self.chain)
            if uses_rejection and isinstance(self.chain, NumpyChain)
            else None
        )
        self.chain = self.rejection_chain or self.chain
        self.ledger = resources.ledger
        self.draft_length = DraftLength(
            speculation.pass_cost,
            speculation.max_rows,
            _max_free_guesses(self.ledger.memory),
            speculation.takes_longest,
        )
        self.drafters = [drafter.start(draft_request, seed) for drafter in speculation.drafters]
        self.limit = math.inf if request.max_tokens is None else request.max_tokens
        # the state of the drafter, its draft, and the seconds that this took, of a draft that was not
        # checked yet
        self.last_draft: tuple[DraftState, Draft, float] | None = None
        self.tallies = [DraftTally(drafter.name) for drafter in speculation.drafters]
        self.n_passes = 0  # passes after the first token
        # False once no cells of wrong guesses can be dropped; then drafting stops
        self.can_drop_cells = True
        # tokens of the slot before the present draft, and whether a checkpoint there is needed for
        # this draft only
        self.n_before_draft, self.has_draft_checkpoint = 0, False
        # rows of the next pass without those of the guesses; more than one after forced text
        self.pass_rows = 0

    def accept(
        self, sequence: Sequence, rows: Iterator[RowLogits], pass_seconds: float
    ) -> tuple[list[Event], Finish | None]:
        """Draw from the row of the last token, and then from the row of each guess until a guess is
        wrong. Then make the guesses for the next pass. Return the events of the new tokens, and the
        reason to finish if the answer ends.
        """
        self.n_passes += bool(sequence.times)
        if sequence.draft:
            events, finish = self._verify(sequence, rows, pass_seconds)
        else:
            events, finish = super().accept(sequence, rows, pass_seconds)
            if self.last_draft:  # it was empty, or the engine has discarded it
                self.draft_length.record_unused(self.last_draft[2])
                self.last_draft = None
            if self.pass_rows == 1:
                self.draft_length.record_single(pass_seconds)
            elif not self.pass_rows:
                self.draft_length.record_prompt(sequence.accounting.prompt_seconds)
        if finish is None and self.can_drop_cells:
            self.pass_rows = len(sequence.tokens) - sequence.n_computed
            self._guess(sequence)
        return events, finish

    def _guess(self, sequence: Sequence) -> None:
        """Fill `sequence.draft` with the guesses of the drafter that is expected to save the most
        time. The draft stays empty if none saves any, and while other answers run: it would not
        be computed, so the drafters do not read the text either. It also stays empty if recurrent
        state is behind the text after a wrong guess: a checkpoint there would be too early.
        """
        if self.ledger.n_busy > 1 or (self.ledger.memory.is_recurrent and self.pass_rows > 1):
            return
        for candidate in self.drafters:
            candidate.follow(sequence)
        # A pass also yields one token without a guess. The draft ends where the engine checks the
        # text for repetition, so that the check reads the same text as without drafting.
        limit = min(self.limit, sequence.repetition_check_at) - len(sequence.times) - 1
        best_gain, count = 0.0, 0
        drafter: DraftState | None = None
        for candidate in self.drafters:
            gain, length = self.draft_length.rate(candidate, limit)
            if length and gain > best_gain:
                best_gain, count, drafter = gain, length, candidate
        if drafter is None:
            return
        start_time = perf_counter()
        count = self._secure_return(sequence.slot, count)
        if not count:
            return
        draft = drafter.draft(count)
        sequence.draft = list(draft.tokens)
        self.last_draft = drafter, draft, perf_counter() - start_time

    def _secure_return(self, slot: int, count: int) -> int:
        """Return how many of `count` wrong guesses can be dropped, all of them after a checkpoint if
        necessary. Without room for one, later drafts are so short that they need none.
        """
        ledger = self.ledger
        self._drop_draft_checkpoint(slot)
        self.n_before_draft = len(ledger.tokens[slot])
        if ledger.can_return(slot, count):
            return count
        start_time = perf_counter()
        self.has_draft_checkpoint = ledger.take_checkpoint(slot)
        if self.has_draft_checkpoint:
            self.draft_length.pass_cost.record_checkpoint(perf_counter() - start_time)
            return count
        self.draft_length.refuse_checkpoints()
        self.can_drop_cells = self.draft_length.max_rows > 1
        return min(count, self.draft_length.max_rows - 1)

    def _drop_draft_checkpoint(self, slot: int) -> None:
        """Drop the checkpoint that was taken for the last draft."""
        if self.has_draft_checkpoint:
            self.ledger.checkpoints.discard(slot, self.n_before_draft)
            self.has_draft_checkpoint = False

    def _verify(
        self, sequence: Sequence, rows: Iterator[RowLogits], pass_seconds: float
    ) -> tuple[list[Event], Finish | None]:
        """Draw a token from each row until a token differs from its guess, and drop the cells of
        the wrong guesses. Record how many guesses were right and how long the pass took. Return the
        same as `accept`.
        """
        assert self.last_draft
        (drafter, draft, drafting_seconds), self.last_draft = self.last_draft, None
        guessed, sequence.draft = sequence.draft, []  # the engine may have shortened the draft
        pass_logits = list(islice(rows, len(guessed) + 1))
        last_token = sequence.tokens[-1]
        start, previous_time = len(sequence.tokens), sequence.last_token_time
        events: list[Event] = []
        n_right = 0
        while True:
            position, length = n_right, len(sequence.tokens)
            if self.rejection_chain and draft.probabilities and position < len(guessed):
                self.rejection_chain.expected = guessed[position], draft.probabilities[position]
            new_events, finish = super().accept(sequence, iter((pass_logits[position],)), 0.0)
            events += new_events
            new_tokens = sequence.tokens[length:]
            n_agreed = common_prefix(new_tokens, guessed[position:])
            n_right += n_agreed
            if finish is not None or n_agreed < len(new_tokens) or position == len(guessed):
                break
        if isinstance(drafter, RowObserver):
            drafter.observe_rows([last_token, *guessed], pass_logits, n_right)
        start_time = perf_counter()
        self._drop_wrong_guesses(sequence, start + n_right)
        return_seconds = perf_counter() - start_time
        # a token that differs from the guess has checked it, too
        n_checked = min(len(guessed), n_right + (n_agreed < len(new_tokens)))
        self.tallies[self.drafters.index(drafter)].record(
            len(guessed), n_checked, n_right, max(0.0, drafting_seconds - draft.reading_seconds)
        )
        drafter.record_result(n_checked, n_right)
        self.draft_length.record_draft(
            len(guessed) + self.pass_rows,
            max(1, len(events)),
            pass_seconds,
            drafting_seconds + return_seconds,
            draft.reading_seconds,
        )
        return _share_times(sequence, events, previous_time, pass_seconds), finish

    def _drop_wrong_guesses(self, sequence: Sequence, n_valid: int) -> None:
        """Drop the sequence's cells after its first `n_valid` tokens. Recurrent state goes back to
        the checkpoint before the draft, and the tokens after it are computed again.
        """
        sequence.n_computed = self.ledger.trim(sequence.slot, n_valid)
        self.can_drop_cells = sequence.n_computed >= self.n_before_draft
        self.draft_length.record_repetition(n_valid - sequence.n_computed)
        self._drop_draft_checkpoint(sequence.slot)

    def on_context_shift(self, sequence: Sequence) -> None:
        """Discard the guesses, and tell the drafters that tokens were dropped from the text."""
        super().on_context_shift(sequence)
        sequence.draft, self.pass_rows = [], 0
        for drafter in self.drafters:
            drafter.on_context_shift()

    def finish(self, sequence: Sequence, finish: Finish) -> str:
        """Record how many tokens were drafted and accepted, and close the drafters. Return the text
        that was held back.
        """
        accounting = sequence.accounting
        counts = [tally.counts() for tally in self.tallies]
        accounting.n_drafted = sum(one.n_guesses for one in counts)
        accounting.n_accepted = sum(one.n_right for one in counts)
        accounting.n_drafts = sum(one.n_drafts for one in counts)
        accounting.drafts = tuple(one for one in counts if one.n_drafts)
        accounting.n_passes = self.n_passes
        if sequence.slot >= 0:
            self._drop_draft_checkpoint(sequence.slot)
        for drafter in self.drafters:
            drafter.close(sequence.tokens)
        return super().finish(sequence, finish)


def _max_free_guesses(memory: CacheMemory) -> float:
    """Return the most guesses that a memory can drop without going back to a checkpoint."""
    return memory.n_rs_seq if memory.is_recurrent else math.inf


def _share_times(
    sequence: Sequence, events: list[Event], previous_time: float, pass_seconds: float
) -> list[Event]:
    """Return the events of one pass with all times divided equally among its tokens: the forward
    pass, the sampling, the grammar, and the gap since the previous token. `sequence.times` is
    updated in the same way.

    `previous_time`: time.perf_counter() of the last token before the pass.
    """
    token_times = [event.token for event in events if event.token]
    if not token_times:
        return events
    count = len(token_times)
    gap = (sequence.last_token_time - previous_time) * 1e3 / count
    decode = pass_seconds * 1e3 / count
    sample, grammar = (
        sum(getattr(times, field) for times in token_times) / count
        for field in ("sample_ms", "constraint_ms")
    )
    equal_times = [
        times._replace(ms=gap, decode_ms=decode, sample_ms=sample, constraint_ms=grammar)
        for times in token_times
    ]
    sequence.times[-count:] = equal_times
    tokens = iter(equal_times)
    return [event._replace(token=next(tokens)) if event.token else event for event in events]


STRATEGIES = (SpeculativeStrategy,)
