"""The engine: many sequences, one forward pass per step, one thread.

submit() and cancel() change what is requested; step() advances every sequence by one pass and
returns the events. The engine computes; the strategy of each request reads the logits.
"""

import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from typing import Protocol, TypeVar

from llmcli.errors import UserError
from llmcli.runtime.binding.batch import BatchRows
from llmcli.runtime.binding.context import Aborted, NoSlot
from llmcli.runtime.engine.forward_pass import ForwardPass, SequenceRows
from llmcli.runtime.engine.schedule import EngineLoad, QueueFull, Schedule
from llmcli.runtime.engine.scheduler import Scheduler
from llmcli.runtime.kv_cache.context_protocols import BatchedMemory
from llmcli.runtime.kv_cache.ledger import Ledger
from llmcli.runtime.requests.repetition import TOKENS_BETWEEN_CHECKS, is_repetitive
from llmcli.runtime.requests.request import NO_REPLAY, Answer, Request
from llmcli.runtime.requests.sequence import Sequence
from llmcli.runtime.sampling import N_SEEDS
from llmcli.runtime.sampling.chain import NativeChainFactory, RowLogits, resolve_seed
from llmcli.runtime.strategies import strategies
from llmcli.runtime.strategies.base import ModelVocabulary, Speculation, StrategyResources
from llmcli.types import Event, Finish

SINGLE_CONVERSATION = Schedule()
PassT = TypeVar("PassT", ForwardPass, BatchRows)


class ForwardContext(BatchedMemory, Protocol):
    """What the engine needs of a context: forward passes, and a memory for the ledger to manage."""

    def decode(self, rows: BatchRows) -> SequenceOf[RowLogits]: ...

    def interrupt(self) -> None: ...


class PrefillReader(Protocol):
    """A second context that computes prompts and moves the result into the engine's context
    (prefill_context.py).
    """

    def can_compute(self, plan: ForwardPass) -> bool: ...

    def compute(self, plan: ForwardPass) -> SequenceOf[RowLogits]: ...


class Engine:
    """Owns the context. All calls come from one thread, except cancel() and interrupting the
    context.
    """

    def __init__(
        self,
        context: ForwardContext,
        vocabulary: ModelVocabulary,
        native: NativeChainFactory | None,
        speculation: Speculation | None = None,
        keeps_idle: bool = True,
        schedule: Schedule = SINGLE_CONVERSATION,
        prefill_reader: PrefillReader | None = None,
    ) -> None:
        """`keeps_idle` is passed to the ledger."""
        self.context, self.prefill_reader, self.ledger = (
            context,
            prefill_reader,
            Ledger(context, keeps_idle),
        )
        self.scheduler = Scheduler(context, self.ledger, schedule)
        self.resources = StrategyResources(vocabulary, native, self.ledger, speculation)
        self._live: dict[int, Sequence] = {}
        self._answers: dict[int, Answer] = {}
        self._passing: ForwardPass | None = None  # being computed now
        self._count = 0
        self._prompted = self._drawn = 0  # tokens computed of prompts, and generated

    @property
    def is_busy(self) -> bool:
        """Return whether any sequence is unfinished."""
        return bool(self._live)

    @property
    def is_steady(self) -> bool:
        """Return whether the next pass will resemble the last: the same answers, and no prompt to
        compute.
        """
        return self.scheduler.is_steady

    @property
    def stats(self) -> EngineLoad:
        """Return the current load."""
        scheduler, drawn = (
            self.scheduler,
            self._drawn + sum(len(one.times) for one in self._live.values()),
        )
        return EngineLoad(
            len(scheduler.running),
            len(scheduler.waiting),
            scheduler.waiting.n_preempted,
            self.ledger.used_cells,
            self.ledger.size,
            self._prompted,
            drawn,
            scheduler.n_preemptions,
        )

    @property
    def schedule(self) -> Schedule:
        """Return the schedule. It may be set while nothing runs."""
        return self.scheduler.schedule

    @schedule.setter
    def schedule(self, schedule: Schedule) -> None:
        self.scheduler.schedule = schedule

    def check(self) -> None:
        """Assert that the ledger agrees with llama.cpp's own positions."""
        self.ledger.check()
        busy = sum(1 + len(one.branch_slots) for one in self.scheduler.running.values())
        assert self.ledger.n_idle == self.context.n_seq_max - busy, (self.ledger.n_idle, busy)

    def submit(self, request: Request) -> int:
        """Queue a request. Return the id that its events carry. The prompt must fit the context.

        Raises QueueFull when too many requests wait.
        """
        self._admit(1)
        return self._queue(request, resolve_seed(request.sampling.seed)).id

    def submit_samples(self, request: Request, count: int) -> list[int]:
        """Queue `count` answers to one prompt, with seeds s, s + 1, and so on. Return their ids.
        The prompt is computed once if cells can be shared.

        Raises QueueFull when too many requests wait.
        """
        self._admit(count)
        seed = resolve_seed(request.sampling.seed)
        first = self._queue(request, seed)
        others = [
            self._queue(request, (seed + more) % N_SEEDS, more, first) for more in range(1, count)
        ]
        first.has_samples = bool(others)
        return [one.id for one in (first, *others)]

    def _admit(self, count: int) -> None:
        most, waiting = self.scheduler.schedule.max_waiting, len(self.scheduler.waiting)
        if most is not None and waiting + count > most:
            raise QueueFull(
                f"{waiting} requests wait already",
                hint="send the request again in a few seconds",
            )

    def _queue(
        self, request: Request, seed: int, number: int = 0, after: Sequence | None = None
    ) -> Sequence:
        assert 0 < len(request.tokens) <= self.context.n_ctx, (
            len(request.tokens),
            self.context.n_ctx,
        )
        self._count += 1
        strategy = strategies()[request.strategy](request, seed, self.resources)
        assert strategy.slots <= self.context.n_seq_max, (strategy.slots, self.context.n_seq_max)
        started = time.perf_counter() if request.start_time is None else request.start_time
        sequence = self._live[self._count] = Sequence(
            self._count,
            request,
            strategy,
            seed,
            started,
            tokens=list(request.tokens),
            last_token_time=started,
            prefix_source=after,
            prefix_length=len(request.tokens),
            replayed=request.replays[number] if request.replays else NO_REPLAY,
        )
        if not (request.allow_repetition or request.ignore_eos):
            sequence.repetition_check_at = TOKENS_BETWEEN_CHECKS
        self.scheduler.add(sequence)
        return sequence

    def cancel(self, sequence: int) -> None:
        """End a sequence at the next step; its cells and its text so far are kept. Callable from
        any thread.

        If most rows of a long pass belong to the sequence, the pass is aborted, and the rows of the
        others are computed again.
        """
        live, passing = (
            self._live.get(sequence),
            self._passing,
        )  # read once: the engine thread changes them
        if live:
            live.is_cancelled = True
            if passing and passing.is_mostly(live):
                self.context.interrupt()

    def abort(self, sequence: int) -> None:
        """End a sequence at once and discard its answer; its cells stay cached."""
        if live := self._live.get(sequence):
            self._close(live, "cancelled")
        self._answers.pop(sequence, None)

    def pop_answer(self, sequence: int) -> Answer:
        """Return and forget the answer of a finished sequence."""
        return self._answers.pop(sequence)

    def step(self) -> list[Event]:
        """Advance every sequence by one forward pass.

        Raises UserError when llama.cpp could not compute it.
        """
        events: list[Event] = []
        plan = self._single_token_pass()
        planned = plan is None
        if plan is None:
            events += [
                self._close(one, "cancelled")
                for one in tuple(self._live.values())
                if one.is_cancelled
            ]
            plan, over = self.scheduler.next_pass()
            while over:
                events.append(self._close(over, "context_full"))
                plan, over = self.scheduler.next_pass()
            if not plan.tokens:
                return events
            self._passing = plan
        begun = time.perf_counter()
        try:
            if not planned:
                rows = self._decode(plan)
            elif self.prefill_reader and self.prefill_reader.can_compute(plan):
                rows = self._with_room(self.prefill_reader.compute, plan)
            else:
                with self.scheduler.decodes_offloaded(plan):
                    rows = self._decode(plan)
        except Aborted:
            self._restore(plan)
            return events
        except UserError:
            self._restore(plan)
            raise
        # the cells of a sliding window have no slot left, which the ledger does not count
        except NoSlot:
            if self.scheduler.preempt_one():
                return events
            return [*events, self._close(plan.shares[-1].sequence, "context_full")]
        finally:
            self._passing = (
                None  # otherwise a later cancel() would abort the next pass, of other sequences
            )
        spent = time.perf_counter() - begun
        if planned:
            self.scheduler.record_pass(len(plan.tokens), spent)
        at = 0
        for sequence, count, wanted in plan.shares:
            events += self._advance(sequence, count, iter(rows[at : at + wanted]), spent)
            at += wanted
        return events

    def _restore(self, plan: ForwardPass) -> None:
        """Undo a pass that was not finished: parts of it may be in the cache."""
        for sequence, _, _ in plan.shares:
            for slot in (sequence.slot, *sequence.branch_slots):
                self.ledger.restore(slot)
            if sequence.n_computed < len(
                sequence.tokens
            ):  # else its branches have moved on from there
                sequence.n_computed = len(self.ledger.tokens[sequence.slot])
            sequence.n_reused = min(sequence.n_reused, sequence.n_computed)

    def _single_token_pass(self) -> ForwardPass | None:
        """Return the most frequent pass, one token of a single answer, or None when the scheduler
        must plan it.

        After a forward pass none of the engine's code is in the CPU caches, so the less of it runs
        between two passes of one answer, the faster the answer.
        """
        if len(self._live) != 1:
            return None
        (sequence,) = self._live.values()
        at, tokens = sequence.n_computed, sequence.tokens
        if len(tokens) - at != 1 or sequence.draft or sequence.slot < 0 or sequence.is_cancelled:
            return None
        if len(tokens) > self.context.n_ctx or self.ledger.used_cells >= self.ledger.size:
            return None
        return ForwardPass(
            [tokens[at]], [at], [sequence.slot], [True], [SequenceRows(sequence, 1, 1)]
        )

    def _decode(self, plan: ForwardPass) -> SequenceOf[RowLogits]:
        return self._with_room(
            self.context.decode,
            BatchRows(plan.tokens, plan.positions, plan.slots, plan.wants_logits),
        )

    def _with_room(
        self, compute: Callable[[PassT], SequenceOf[RowLogits]], work: PassT
    ) -> SequenceOf[RowLogits]:
        """Call `compute`; if the context has no free cells, evict idle ones and call it again."""
        try:
            return compute(work)
        except NoSlot:
            if not self.ledger.evict_idle():
                raise
            return compute(work)

    def _advance(
        self, sequence: Sequence, count: int, rows: Iterator[RowLogits], spent: float
    ) -> list[Event]:
        start, told = sequence.n_computed, list[Event]()
        if start < len(sequence.tokens):
            self.ledger.append(sequence.slot, sequence.tokens[start : start + count])
            if sequence.is_prefilling:
                self._prompted += count
                if not sequence.times and not sequence.overflow_stats.times:
                    if not sequence.prompt_seconds:
                        sequence.queue_seconds = max(
                            0.0, time.perf_counter() - spent - sequence.start_time
                        )
                    sequence.prompt_seconds += spent
            sequence.record_scores(rows, start, start + count)
            sequence.n_computed += count
            if sequence.n_computed < len(sequence.tokens):
                return []
            if sequence.prompt_scores and not sequence.times:
                told.append(
                    Event(sequence.id, None, "", prompt_logprobs=tuple(sequence.prompt_scores))
                )
            if sequence.draft:
                self.ledger.append(sequence.slot, sequence.draft)
        else:
            for slot, token in sequence.strategy.pending_rows():
                self.ledger.append(slot, [token])
        if not sequence.has_samples:
            return told + self._accept(sequence, rows, spent)
        sequence.has_samples = False
        row = next(rows)
        together = (sequence, *self._fork(sequence))
        return told + [
            event for one in together for event in self._accept(one, iter((row,)), spent)
        ]

    def _fork(self, first: Sequence) -> list[Sequence]:
        """Start the samples that wait for this prompt, in cells shared with it. Samples without a
        slot keep waiting.
        """
        waiting = [
            one for one in self.scheduler.waiting if not one.n_preempted
        ]  # a preempted one has generated tokens already
        same = [
            one for one in waiting if one.prefix_source is first and one.request is first.request
        ]
        placed = [
            one
            for one in same
            if one.strategy.slots == 1 and self.scheduler.admission.admit_fork(first, one)
        ]
        for one in placed:
            one.queue_seconds = first.queue_seconds
        return placed

    def _accept(self, sequence: Sequence, rows: Iterator[RowLogits], spent: float) -> list[Event]:
        try:
            events, finish = sequence.strategy.accept(sequence, rows, spent)
        except UserError as error:
            sequence.error = error  # the other sequences continue
            return [self._close(sequence, "failed")]
        if finish is None and len(sequence.times) >= sequence.repetition_check_at:
            sequence.repetition_check_at = len(sequence.times) + TOKENS_BETWEEN_CHECKS
            finish = "repetition" if is_repetitive(sequence.text) else None
        return [*events, self._close(sequence, finish)] if finish else events

    def _close(self, sequence: Sequence, finish: Finish) -> Event:
        rest = sequence.strategy.finish(sequence, finish)
        sequence.text.append(rest)
        sequence.finish = finish
        self.scheduler.remove(sequence)
        del self._live[sequence.id]
        self._drawn += len(sequence.times)
        self._answers[sequence.id] = sequence.build_answer()
        return Event(sequence.id, None, rest, finish)
