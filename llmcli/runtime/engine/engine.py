"""The engine: answers many requests in one context. Each step computes one forward pass for all
running sequences, on one thread.

submit() and cancel() change which requests are answered. step() computes a pass and returns the
events of the new tokens. The engine computes logits; the strategy of each request
(runtime/strategies/) chooses tokens from them.
"""

import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from concurrent.futures import FIRST_COMPLETED, wait
from typing import Protocol

from llmcli.errors import UserError
from llmcli.runtime.binding.contexts.context import Aborted, NoSlot
from llmcli.runtime.binding.rows.batch import BatchRows
from llmcli.runtime.engine.forward_pass import ForwardPass, SequenceRows
from llmcli.runtime.engine.interruption import RunningPass, is_worth_interrupting
from llmcli.runtime.engine.pass_ahead import BackgroundDecoder, PassAhead, plan_pass_ahead
from llmcli.runtime.engine.prompt_checkpoints import checkpoint_lengths
from llmcli.runtime.engine.schedule import EngineLoad, QueueFull, Schedule
from llmcli.runtime.engine.scheduler import Scheduler
from llmcli.runtime.engine.thread_team import ThreadTeam
from llmcli.runtime.kv_cache.attention_cost import SinglePassTimes
from llmcli.runtime.kv_cache.context_protocols import BatchedMemory
from llmcli.runtime.kv_cache.ledger import Ledger
from llmcli.runtime.requests.repetition import TOKENS_BETWEEN_CHECKS, is_repetitive
from llmcli.runtime.requests.request import NO_REPLAY, Answer, Request
from llmcli.runtime.requests.sequence import Sequence, SharedPrefix
from llmcli.runtime.requests.thinking import ThinkingTracker
from llmcli.runtime.sampling import N_SEEDS
from llmcli.runtime.sampling.chain import (
    JointDraw,
    NativeChainFactory,
    PlannedDraw,
    RowLogits,
    resolve_seed,
)
from llmcli.runtime.strategies import strategies
from llmcli.runtime.strategies.base import Speculation, StrategyResources
from llmcli.runtime.vocabulary import Vocabulary
from llmcli.types import Event, Finish, PromptProgress

SINGLE_CONVERSATION = Schedule()


class ForwardContext(BatchedMemory, BackgroundDecoder, Protocol):
    """The methods of a context that the engine calls, in addition to those for the scheduler and
    the ledger.
    """

    def decode(self, rows: BatchRows) -> SequenceOf[RowLogits]: ...

    def interrupt(self) -> None: ...


class PrefillReader(Protocol):
    """A second context that computes prompts and moves their cells to the engine's context
    (prefill_context.py).
    """

    def can_compute(self, plan: ForwardPass) -> bool:
        """Return whether the second context should compute this pass."""
        ...

    def compute(self, plan: ForwardPass) -> SequenceOf[RowLogits]:
        """Compute a pass in the second context. Return the rows of logits, in the order of the
        pass.
        """
        ...


class Engine:
    """Answers the requests of one context. All methods must be called from one thread, except
    cancel(), which any thread may call.
    """

    def __init__(
        self,
        context: ForwardContext,
        vocabulary: Vocabulary,
        native: NativeChainFactory | None,
        speculation: Speculation | None = None,
        keeps_idle: bool = True,
        schedule: Schedule = SINGLE_CONVERSATION,
        prefill_reader: PrefillReader | None = None,
        exact_rows: int = 1,
        token_bytes: float = 0.0,
        thread_team: ThreadTeam | None = None,
        overlaps_passes: bool = False,
    ) -> None:
        """`native`: makes llama.cpp's sampler chains; None uses numpy. `keeps_idle`: whether the
        end of an idle slot can be evicted alone (see Ledger). `prefill_reader`: a second context
        for prompts, or None. `exact_rows`: see StrategyResources. `token_bytes`: bytes of a token
        in the KV cache; 0 if unknown. `thread_team`: changes the number of threads of the context;
        None to leave it. `overlaps_passes`: whether the next pass begins as soon as the tokens are
        drawn, while their texts are handled (pass_ahead.py).
        """
        self.thread_team, self.overlaps_passes = thread_team, overlaps_passes
        self.context, self.prefill_reader = context, prefill_reader
        self.ledger = Ledger(context, keeps_idle)
        self.scheduler = Scheduler(context, self.ledger, schedule, token_bytes)
        self.resources = StrategyResources(vocabulary, native, self.ledger, speculation, exact_rows)
        self._single_passes = SinglePassTimes(self.scheduler.offload_store.costs.decode)
        # cells in use during the last pass; None for a pass of the prefill context
        self._pass_cells: int | None = None
        self._compute_seconds = 0.0  # of the last pass, without copies of states
        self._live: dict[int, Sequence] = {}
        self._answers: dict[int, Answer] = {}
        self._current_pass: ForwardPass | None = None  # the scheduled pass being computed
        self._pass_ahead: PassAhead | None = None  # the begun pass of the next step
        self._was_empty = False  # whether the last step had nothing to compute
        # rows of the pass being computed, or of the last one; EngineWatch resets it
        self.pass_rows = 0
        self._count = 0
        # Called with the id of a sequence and the progress of its prompt, before its first pass and
        # after each, if its request asks for it.
        self.on_progress: Callable[[int, PromptProgress], None] = lambda sequence, progress: None
        # totals: computed prompt tokens, and generated tokens
        self._n_prompt_tokens = self._n_tokens = 0
        # totals: forward passes, and the sequences of all passes
        self._n_passes = self._n_pass_sequences = 0

    @property
    def is_busy(self) -> bool:
        """Return whether any request is unfinished."""
        return bool(self._live)

    @property
    def is_steady(self) -> bool:
        """Return whether the next pass will resemble the last one: no request waits, and no prompt
        is to be computed.
        """
        return self.scheduler.is_steady

    @property
    def waits_for_disk(self) -> bool:
        """Return whether a step would do nothing until the beginning of a prompt is read from the
        disk. Right after a step only: a new request may be computed at once.
        """
        # a pass that ended an answer may have made room for a waiting request
        return (
            self._was_empty
            and self.scheduler.waits_for_disk
            and not any(sequence.is_cancelled for sequence in self._live.values())
        )

    @property
    def stats(self) -> EngineLoad:
        """Return the present load of the engine and its totals."""
        scheduler = self.scheduler
        n_tokens = self._n_tokens + sum(len(sequence.times) for sequence in self._live.values())
        return EngineLoad(
            len(scheduler.running),
            len(scheduler.waiting),
            scheduler.waiting.n_preempted,
            self.ledger.used_cells,
            self.ledger.size,
            self._n_prompt_tokens,
            n_tokens,
            scheduler.n_preemptions,
            self._n_passes,
            self._n_pass_sequences,
        )

    @property
    def schedule(self) -> Schedule:
        """Return the limits for passes and queues. They may only be set while nothing runs."""
        return self.scheduler.schedule

    @schedule.setter
    def schedule(self, schedule: Schedule) -> None:
        self.scheduler.schedule = schedule

    def check(self) -> None:
        """Assert that the ledger agrees with llama.cpp's positions and with the running sequences.
        Used by tests.
        """
        self.settle()
        self.ledger.check()
        busy = sum(1 + len(sequence.branch_slots) for sequence in self.scheduler.running.values())
        assert self.ledger.n_idle == self.context.n_seq_max - busy, (self.ledger.n_idle, busy)

    def submit(self, request: Request) -> int:
        """Queue a request, and return the id of its sequence, which its events contain. The prompt
        must fit into the context.

        Raises QueueFull when too many requests wait.
        """
        self._check_queue(1)
        return self._queue(request, resolve_seed(request.sampling.seed)).id

    def submit_samples(self, request: Request, count: int) -> list[int]:
        """Queue `count` answers to one prompt, with consecutive seeds. Return the ids of their
        sequences. The prompt is computed only once if the cache can share cells.

        Raises QueueFull when too many requests wait. If any error is raised, none is queued.
        """
        self._check_queue(count)
        seed, queued = resolve_seed(request.sampling.seed), list[Sequence]()
        try:
            for number in range(count):
                prompt_source = queued[0] if queued else None
                sample_seed = (seed + number) % N_SEEDS
                queued.append(self._queue(request, sample_seed, number, prompt_source))
        except BaseException:
            for sequence in queued:
                self.abort(sequence.id)
            raise
        queued[0].has_samples = count > 1
        return [sequence.id for sequence in queued]

    def _check_queue(self, count: int) -> None:
        """Raise QueueFull if `count` more requests may not wait."""
        max_waiting, waiting = self.scheduler.schedule.max_waiting, len(self.scheduler.waiting)
        if max_waiting is not None and waiting + count > max_waiting:
            raise QueueFull(
                f"{waiting} requests wait already",
                hint="send the request again in a few seconds",
            )

    def _queue(
        self, request: Request, seed: int, number: int = 0, prompt_source: Sequence | None = None
    ) -> Sequence:
        """Queue one answer to a request, and return its sequence. `number`: its number among the
        samples of the request. `prompt_source`: the sample that computes the prompt for this one.
        """
        n_ctx = self.context.n_ctx
        max_tokens = min(n_ctx, request.max_context or n_ctx)
        assert 0 < len(request.tokens) <= max_tokens, (len(request.tokens), max_tokens)
        self._count += 1
        strategy = strategies()[request.strategy](request, seed, self.resources)
        assert strategy.slots <= self.context.n_seq_max, (strategy.slots, self.context.n_seq_max)
        start_time = time.perf_counter() if request.start_time is None else request.start_time
        sequence = self._live[self._count] = Sequence(
            self._count,
            request,
            strategy,
            seed,
            start_time,
            max_tokens,
            tokens=list(request.tokens),
            last_token_time=start_time,
            prefix=SharedPrefix(prompt_source, len(request.tokens)) if prompt_source else None,
            replayed=request.replays[number] if request.replays else NO_REPLAY,
        )
        if request.thinking and request.strategy != "beam":
            sequence.thinking = ThinkingTracker(request.thinking)
        sequence.checkpoint_lengths = self._checkpoint_lengths(request)
        if request.checks_repetition:
            sequence.repetition_check_at = TOKENS_BETWEEN_CHECKS
        self.scheduler.add(sequence)
        return sequence

    def _checkpoint_lengths(self, request: Request) -> tuple[int, ...]:
        """Return at which lengths of a prompt checkpoints are taken. A window that is longer than
        the prompt needs none: its cells are still there when the answer is not much longer.
        """
        context = self.context
        has_dropped = context.is_recurrent or len(request.tokens) > context.n_swa
        if (
            not context.needs_checkpoints
            or not self.schedule.host_bytes
            or request.score_prompt
            or not has_dropped
        ):
            return ()
        return checkpoint_lengths(request.tokens, self.resources.vocabulary)

    def cancel(self, *sequences: int) -> None:
        """End sequences at the next step. Their cells stay cached, and their texts so far become
        their answers. Any thread may call this.

        If most rows of a long running pass belong to cancelled sequences, the pass is aborted. Only
        the rows of this pass are lost; those of other sequences are computed again.
        """
        # each read once, because the engine's thread changes both
        cancelled = [live for number in sequences if (live := self._live.get(number))]
        for live in cancelled:
            live.is_cancelled = True
        current_pass = self._current_pass
        if current_pass is None or not any(
            share.sequence in cancelled for share in current_pass.shares
        ):
            return
        n_cancelled = current_pass.cancelled_rows
        row_seconds = self.scheduler.prefill.row_seconds
        if is_worth_interrupting(
            RunningPass(n_cancelled, len(current_pass.tokens) - n_cancelled, row_seconds)
        ):
            self.context.interrupt()

    def end_thinking(self, *sequences: int) -> bool:
        """Make answers end their thinking with their next token, so that their reply follows. An
        answer that has not begun ends it as soon as it thinks. Return False if none of them thinks
        or may still begin to. Any thread may call this.
        """
        has_effect = False
        for number in sequences:
            live = self._live.get(number)
            thinking = live.thinking if live else None
            if thinking and thinking.may_think:
                thinking.must_end = has_effect = True
        return has_effect

    def abort(self, sequence: int) -> None:
        """End a sequence at once and discard its answer. Its cells stay cached."""
        if live := self._live.get(sequence):
            self._close(live, "cancelled")
        self._answers.pop(sequence, None)

    def pop_answer(self, sequence: int) -> Answer:
        """Remove the answer of a finished sequence from the engine, and return it."""
        return self._answers.pop(sequence)

    def step(self) -> list[Event]:
        """Compute one forward pass, which advances the running sequences. Return the events of new
        and finished answers.

        Raises UserError when llama.cpp cannot compute the pass.
        """
        events: list[Event] = []
        self._was_empty = False
        ahead = self._take_pass_ahead(events)
        plan = ahead.plan if ahead else self._single_token_pass()
        is_scheduled = plan is None
        if plan is None:
            plan = self._schedule_pass(events)
            if not plan.tokens:
                self._was_empty = True
                self._wait_for_disk()
                return events
            self._current_pass = plan
            # cancelled after the pass was planned, but before it could be interrupted
            if plan.cancelled_rows:
                self._current_pass = None
                return events
            self._report_starts(plan)
        self.pass_rows = len(plan.tokens)
        is_joint = len(plan.shares) > 1 or self.overlaps_passes
        joint_draw = self._prepare_draws(plan) if is_joint else None
        start_time = time.perf_counter()
        try:
            rows = self._end_pass_ahead(ahead) if ahead else self._compute(plan, is_scheduled)
        except (Aborted, NoSlot, UserError) as error:
            if ahead:  # the next step computes it again, and reports the error
                self._restore(plan)
                return events
            return events + self._handle_failed_pass(plan, error)
        finally:
            # so that a later cancel() does not abort the next pass, which may belong to other
            # sequences
            self._current_pass = None
        seconds = self._compute_seconds if ahead else time.perf_counter() - start_time
        self._n_passes += 1
        self._n_pass_sequences += len(plan.shares)
        if is_scheduled or len(plan.tokens) > 1:
            compute_seconds = self._compute_seconds
            self.scheduler.record_pass(len(plan.tokens), seconds, compute_seconds)
            if self._pass_cells is not None:
                self.scheduler.record_attention(plan, self._pass_cells, compute_seconds)
            self._single_passes.flush()
        else:
            self._single_passes.add(plan.positions[0], self.ledger.used_cells, seconds)
        if joint_draw is not None:
            joint_draw.draw(rows)
            self._begin_pass_ahead(plan)
        first = 0
        for sequence, count, n_logits in plan.shares:
            events += self._advance(sequence, count, iter(rows[first : first + n_logits]), seconds)
            first += n_logits
        return events

    def settle(self) -> None:
        """Drop the pass that was begun ahead of its step, if there is one. To be called between
        two steps before anything else reads or changes the cache.
        """
        ahead, self._pass_ahead = self._pass_ahead, None
        if ahead:
            ahead.drop_all()

    def _begin_pass_ahead(self, plan: ForwardPass) -> None:
        """Begin the pass after `plan`, whose tokens are drawn, if all requests run in it and there
        is room for it without evicting cells.
        """
        ledger, disk_cache = self.ledger, self.scheduler.disk_cache
        if (
            not self.overlaps_passes
            or len(plan.shares) != len(self._live)
            or not (self.context.can_begin_decode and ledger.can_fork and ledger.keeps_idle)
            # the cells of `plan` are not recorded yet
            or ledger.used_cells + len(plan.tokens) + len(plan.shares) > ledger.size
            or (disk_cache is not None and disk_cache.has_pending)
        ):
            return
        following = plan_pass_ahead(plan)
        if following is None or (
            self.prefill_reader is not None and self.prefill_reader.can_compute(following)
        ):
            return
        try:
            self._pass_ahead = PassAhead(self.context, ledger, following)
        except OSError:  # the system gives no thread
            self.overlaps_passes = False

    def _take_pass_ahead(self, events: list[Event]) -> PassAhead | None:
        """Return the pass that was begun for this step, without the rows of sequences that have
        ended or got another token. Return None if no row is left. Cancelled sequences of the pass
        are ended, and their last events are appended to `events`.
        """
        ahead = self._pass_ahead
        if ahead is None:
            return None
        for share in ahead.plan.shares:
            if share.sequence.is_cancelled:
                events.append(self._close(share.sequence, "cancelled"))
        ahead.drop_unfit()
        self._pass_ahead = None
        return ahead if ahead.plan.shares else None

    def _end_pass_ahead(self, ahead: PassAhead) -> SequenceOf[RowLogits]:
        """Wait for a pass that was begun ahead, and return its rows of logits."""
        self._pass_cells = self.ledger.used_cells
        rows, self._compute_seconds = ahead.end()
        if self.thread_team:
            self.thread_team.observe_pass(len(rows), self._compute_seconds)
        return rows

    def _prepare_draws(self, plan: ForwardPass) -> JointDraw | None:
        """Prepare one draw for all sequences whose next token is drawn from one row of logits.
        Their strategies take the tokens over in `_advance`. Return None if there are fewer than
        two, and passes do not overlap.

        This is faster before the pass than after it, when nothing is left in the CPU caches.
        """
        native = self.resources.native
        if native is None:
            return None
        draws: list[PlannedDraw] = []
        row = 0
        for sequence, count, n_logits in plan.shares:
            is_complete = sequence.n_computed + count == len(sequence.tokens)
            if n_logits == 1 and is_complete and not sequence.has_samples:
                draw = sequence.strategy.plan_draw(sequence, row)
                if draw is not None:
                    draws.append(draw)
            row += n_logits
        is_joint = len(draws) > 1 or (bool(draws) and self.overlaps_passes)
        return native.prepare_draws(draws) if is_joint else None

    def _schedule_pass(self, events: list[Event]) -> ForwardPass:
        """Return the next pass of the scheduler. It is empty when there is nothing to compute.
        Sequences that are cancelled or too long for the pool are ended first, and their last events
        are appended to `events`.
        """
        for sequence in tuple(self._live.values()):
            if sequence.is_cancelled:
                events.append(self._close(sequence, "cancelled"))
        while True:
            plan, too_long = self.scheduler.next_pass()
            if too_long is None:
                return plan
            events.append(self._close(too_long, "context_full"))

    def _wait_for_disk(self) -> None:
        """If there is nothing to do until the beginning of a prompt is read from the disk, wait,
        unless the caller of `step` is woken then.
        """
        admission = self.scheduler.admission
        disk_cache = admission.disk_cache
        if disk_cache and disk_cache.loader.on_loaded is None and self.waits_for_disk:
            wait([load.future for load in admission.loading], return_when=FIRST_COMPLETED)

    def _compute(self, plan: ForwardPass, is_scheduled: bool) -> SequenceOf[RowLogits]:
        """Compute a pass, and return its rows of logits. A pass that the prefill context should
        compute is computed there. Otherwise running answers are offloaded first if the pass is
        long. `is_scheduled`: False for the passes of `_single_token_pass`, which need neither.
        """
        if not is_scheduled:
            return self._compute_with_room(self._decode, plan)
        if self.prefill_reader and self.prefill_reader.can_compute(plan):
            self._pass_cells = None
            return self._compute_with_room(self.prefill_reader.compute, plan)
        with self.scheduler.decodes_offloaded(plan):
            self._pass_cells = self.ledger.used_cells
            return self._compute_with_room(self._decode, plan)

    def _compute_with_room(
        self, compute: Callable[[ForwardPass], SequenceOf[RowLogits]], plan: ForwardPass
    ) -> SequenceOf[RowLogits]:
        """Call `compute` with the pass, and measure its time. If the context has no free cells,
        evict all idle cells and call it once more.
        """
        start_time = time.perf_counter()
        try:
            rows = compute(plan)
        except NoSlot:
            if not self.ledger.evict_idle():
                raise
            start_time = time.perf_counter()
            rows = compute(plan)
        self._compute_seconds = time.perf_counter() - start_time
        if self.thread_team:
            self.thread_team.observe_pass(len(plan.tokens), self._compute_seconds)
        return rows

    def _decode(self, plan: ForwardPass) -> SequenceOf[RowLogits]:
        """Compute a pass in the engine's context, and return its rows of logits."""
        return self.context.decode(
            BatchRows(plan.tokens, plan.positions, plan.slots, plan.wants_logits, plan.branches)
        )

    def _handle_failed_pass(
        self, plan: ForwardPass, error: Aborted | NoSlot | UserError
    ) -> list[Event]:
        """Restore the state before a pass that failed with `error`. If the context had no room,
        preempt a sequence, or end the last sequence of the pass and return its last event.

        Raises `error` again if it is a UserError.
        """
        if isinstance(error, NoSlot):
            # the layers with a sliding window have no free cells; the ledger does not count theirs
            if self.scheduler.preempt_one():
                return []
            return [self._close(plan.shares[-1].sequence, "context_full")]
        self._restore(plan)
        if isinstance(error, UserError):
            raise error
        return []

    def _restore(self, plan: ForwardPass) -> None:
        """Remove the cells of a pass that was interrupted or failed, some of which may be in the
        cache already.
        """
        for sequence, _, _ in plan.shares:
            for slot in (sequence.slot, *sequence.branch_slots):
                self.ledger.restore(slot)
            # branches of a beam search have more tokens than `sequence.tokens`, which are not
            # counted in `n_computed`
            if sequence.n_computed < len(sequence.tokens):
                sequence.n_computed = len(self.ledger.tokens[sequence.slot])
            sequence.accounting.n_reused = min(sequence.accounting.n_reused, sequence.n_computed)

    def _single_token_pass(self) -> ForwardPass | None:
        """Return a pass of one token if the engine has a single request, and its answer needs only
        its next token. This is the most frequent case. Return None when the scheduler must plan the
        pass.

        This shortcut makes answers faster: after a forward pass none of the engine's code is in the
        CPU caches, so all code between two passes is slow.
        """
        if len(self._live) != 1:
            return None
        (sequence,) = self._live.values()
        position, tokens = sequence.n_computed, sequence.tokens
        has_next = len(tokens) - position == 1 and sequence.slot >= 0
        if not has_next or sequence.draft or sequence.is_cancelled:
            return None
        if sequence.is_too_long or self.ledger.used_cells >= self.ledger.size:
            return None
        return ForwardPass(
            [tokens[position]], [position], [sequence.slot], [True], [SequenceRows(sequence, 1, 1)]
        )

    def _advance(
        self, sequence: Sequence, count: int, rows: Iterator[RowLogits], pass_seconds: float
    ) -> list[Event]:
        """Record `count` computed tokens of a sequence. If all its tokens are computed, let its
        strategy choose the next ones from `rows`. Return the new events.
        """
        start = sequence.n_computed
        events: list[Event] = []
        if start < len(sequence.tokens):
            self.ledger.append(sequence.slot, sequence.tokens[start : start + count])
            if sequence.is_prefilling:
                self._record_prefill(sequence, count, pass_seconds)
            if sequence.request.score_prompt:
                sequence.record_scores(rows, start, start + count)
            sequence.n_computed += count
            if sequence.n_computed in sequence.checkpoint_lengths:
                self.ledger.take_checkpoint(sequence.slot)
            if sequence.n_computed < len(sequence.tokens):
                return []
            if sequence.prompt_scores and not sequence.times:
                scores = tuple(sequence.prompt_scores)
                events.append(Event(sequence.id, None, "", prompt_logprobs=scores))
            if sequence.draft:
                draft = sequence.draft
                path = [draft.tokens[node] for node in draft.main_path()]
                self.ledger.append(sequence.slot, path)
        else:
            for slot, token in sequence.strategy.pending_rows():
                self.ledger.append(slot, [token])
        if not sequence.has_samples:
            return events + self._accept(sequence, rows, pass_seconds)
        sequence.has_samples = False
        row = next(rows)
        for sample in (sequence, *self._fork(sequence)):
            events += self._accept(sample, iter((row,)), pass_seconds)
        return events

    def _record_prefill(self, sequence: Sequence, count: int, pass_seconds: float) -> None:
        """Record the statistics of computed prompt tokens: their number, the seconds of their
        passes, and the seconds before the first of these passes.
        """
        self._n_prompt_tokens += count
        if sequence.times or sequence.overflow_stats.times:
            return
        if not sequence.accounting.prompt_seconds:
            waited = time.perf_counter() - pass_seconds - sequence.start_time
            sequence.accounting.queue_seconds = max(0.0, waited)
        sequence.accounting.prompt_seconds += pass_seconds
        if sequence.request.reports_progress:
            self._report_progress(sequence, sequence.n_computed + count)

    def _report_starts(self, plan: ForwardPass) -> None:
        """Report the progress of the prompts whose first pass is now computed: the cached part."""
        for share in plan.shares:
            sequence = share.sequence
            if (
                sequence.request.reports_progress
                and sequence.is_prefilling
                and not sequence.accounting.prompt_seconds
                and not sequence.times
            ):
                self._report_progress(sequence, sequence.n_computed)

    def _report_progress(self, sequence: Sequence, n_processed: int) -> None:
        """Call `on_progress` for a sequence. `n_processed`: tokens of its prompt that are computed
        or were in the cache.
        """
        accounting = sequence.accounting
        milliseconds = accounting.prompt_seconds * 1e3
        self.on_progress(
            sequence.id,
            PromptProgress(sequence.n_prompt, accounting.n_reused, n_processed, milliseconds),
        )

    def _fork(self, first: Sequence) -> list[Sequence]:
        """Start the samples that wait for the prompt of `first`, and return them. They share its
        cells. Samples without a free slot keep waiting.
        """
        samples = [
            sequence
            for sequence in self.scheduler.waiting
            # a preempted sample has generated tokens already, so it does not start here
            if not sequence.preemption.count
            and sequence.prefix
            and sequence.prefix.source is first
            and sequence.request is first.request
            and sequence.strategy.slots == 1
        ]
        admitted = [
            sample for sample in samples if self.scheduler.admission.admit_fork(first, sample)
        ]
        for sample in admitted:
            sample.accounting.queue_seconds = first.accounting.queue_seconds
        return admitted

    def _accept(
        self, sequence: Sequence, rows: Iterator[RowLogits], pass_seconds: float
    ) -> list[Event]:
        """Let the strategy of a sequence choose tokens from `rows`, and end the sequence if its
        answer is complete, repeats itself or has failed. Return the new events.
        """
        try:
            events, finish = sequence.strategy.accept(sequence, rows, pass_seconds)
        except AssertionError:
            raise  # the state of the engine is wrong
        except Exception as error:  # noqa: BLE001 (only this sequence ends; its answer has the error)
            sequence.error = error
            return [self._close(sequence, "failed")]
        if finish is None and len(sequence.times) >= sequence.repetition_check_at:
            sequence.repetition_check_at = len(sequence.times) + TOKENS_BETWEEN_CHECKS
            thinking = sequence.thinking
            if is_repetitive(sequence.text) and not sequence.is_constrained:
                if thinking and thinking.is_bounded:
                    thinking.must_end = True  # a reply follows
                else:
                    finish = "repetition"
        return [*events, self._close(sequence, finish)] if finish else events

    def _close(self, sequence: Sequence, finish: Finish) -> Event:
        """End a sequence: release its slots, and store its answer for `pop_answer`. Return its last
        event.
        """
        if self._pass_ahead:
            self._pass_ahead.drop(sequence)
        remaining_text = sequence.strategy.finish(sequence, finish)
        sequence.text.append(remaining_text)
        sequence.finish = finish
        self.scheduler.remove(sequence)
        del self._live[sequence.id]
        self._n_tokens += len(sequence.times)
        self._answers[sequence.id] = sequence.build_answer()
        return Event(sequence.id, None, remaining_text, finish)
