"""The scheduler: decides which requests run, which wait, and what the next forward pass computes.

A pass first gets the next tokens of running answers, then pieces of prompts (prefill.py). Waiting
requests start when there is room (admission.py). When running answers need more cells than are
free, the request with the lowest priority is preempted (among equals, that of the client with the
most running answers): its cells are moved to host memory or dropped, and it continues when there is
room again. A preempted beam search starts again instead, because none of its text was sent yet.
Background requests are also preempted while another request waits for their slots or cells, and so
is an answer of a client that has several while another client waits long for its first. A request
ends as context_full only when it is too long for the whole pool and no tokens may be dropped
(overflow.py).
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from llmcli.runtime.disk_cache.disk_cache import DiskCache
from llmcli.runtime.engine.admission import Admission
from llmcli.runtime.engine.forward_pass import TILE_ROWS, ForwardPass
from llmcli.runtime.engine.overflow import OverflowHandler
from llmcli.runtime.engine.prefill import PrefillPlanner
from llmcli.runtime.engine.schedule import Schedule
from llmcli.runtime.engine.scheduler_state import SchedulerState, is_long
from llmcli.runtime.kv_cache.context_protocols import BatchedMemory
from llmcli.runtime.kv_cache.ledger import Ledger
from llmcli.runtime.kv_cache.offload import DecodeOffload, IdleOffload, PreemptionSwap
from llmcli.runtime.kv_cache.offload_store import OffloadStore
from llmcli.runtime.kv_cache.prefix_match import PrefixMatch
from llmcli.runtime.requests.sequence import Sequence
from llmcli.runtime.requests.token_tree import NO_DRAFT


class Scheduler:
    """Assigns slots to requests, and plans forward passes."""

    def __init__(
        self,
        context: BatchedMemory,
        ledger: Ledger,
        schedule: Schedule,
        token_bytes: float = 0.0,
    ) -> None:
        """`token_bytes`: bytes of a token in the KV cache; 0 if unknown."""
        self.context, self.ledger = context, ledger
        self.state = SchedulerState(context, ledger, schedule)
        self.running, self.waiting = self.state.running, self.state.waiting
        self.offload_store = OffloadStore(ledger, token_bytes)
        self.offload_store.set_budget(schedule.host_bytes, schedule.measure_host_bytes)
        self.swap = PreemptionSwap(self.offload_store)
        self.idle_offload = IdleOffload(self.offload_store)
        self.decode_offload = DecodeOffload(self.offload_store)
        self.admission = Admission(self.state, self.swap, self.idle_offload)
        self.overflow = OverflowHandler(self.state)
        self.prefill = PrefillPlanner(self.state, self.overflow)
        self.n_preemptions = 0
        self.last_was_prefill = False  # whether the last pass computed prompts only

    @property
    def disk_cache(self) -> DiskCache | None:
        """Return the prefix cache on disk, or None without one."""
        return self.admission.disk_cache

    @disk_cache.setter
    def disk_cache(self, disk_cache: DiskCache) -> None:
        self.admission.disk_cache = disk_cache
        self.offload_store.before_offload = disk_cache.save_slot

    @property
    def schedule(self) -> Schedule:
        """Return the limits for passes and queues. They may only be set while nothing runs."""
        return self.state.schedule

    @schedule.setter
    def schedule(self, schedule: Schedule) -> None:
        self.state.schedule = schedule
        self.offload_store.set_budget(schedule.host_bytes, schedule.measure_host_bytes)

    @property
    def is_steady(self) -> bool:
        """Return whether no request waits, and every running sequence has only a few tokens to
        compute.
        """
        return not self.waiting and not any(map(is_long, self.running.values()))

    @property
    def waits_for_disk(self) -> bool:
        """Return whether nothing runs, and the beginning of a waiting prompt is being read."""
        return not self.running and bool(self.admission.loading)

    def add(self, sequence: Sequence) -> None:
        """Add a sequence to the waiting queue."""
        sequence.match, sequence.common_lengths = PrefixMatch(), {}  # its tokens may be new
        self.waiting.add(sequence, self.state.n_passes)

    def remove(self, sequence: Sequence) -> None:
        """Remove a finished sequence. Its cells stay cached for later prompts."""
        if sequence.times:
            self.offload_store.costs.record_answer(len(sequence.times))
        self.admission.history.finish(sequence.id, sequence.tokens)
        self.admission.end_load(sequence)
        if sequence.slot >= 0:
            self.ledger.release(sequence.slot, sequence.request.turn)
            del self.running[sequence.id]
            if self.disk_cache:
                self.disk_cache.note_end(sequence.slot)
            return
        self.waiting.remove(sequence, self.state.n_passes)
        if sequence.preemption.state:
            self.swap.drop(sequence.preemption.state)

    def record_pass(self, rows: int, seconds: float, compute_seconds: float) -> None:
        """Record the duration of a pass, which predicts that of later passes. `rows`: number of its
        rows. `seconds`: wall time, in which other requests waited. `compute_seconds`: the same
        without copies of states.
        """
        self.state.n_passes += 1
        if self.prefill.record_pass(rows, seconds):
            self.offload_store.costs.record_pass(rows, compute_seconds)

    def record_attention(self, plan: ForwardPass, used_cells: int, seconds: float) -> None:
        """Record the duration of a pass of many rows, which measures what the cells of other
        sequences cost. The tokens of the pass must not be recorded in the ledger yet. `used_cells`:
        cells that were in use right before the pass. `seconds`: wall time of the computation.
        """
        rows = len(plan.tokens)
        if rows < TILE_ROWS:
            return
        # averages over the rows, whose own cells are the cached ones and the earlier rows
        cached_cells = sum(
            share.tokens * len(self.ledger.tokens[share.sequence.slot]) for share in plan.shares
        )
        new_cells = sum(share.tokens * share.tokens / 2 for share in plan.shares)
        self.offload_store.costs.prefill.record(
            (cached_cells + new_cells) / rows, used_cells - cached_cells / rows, seconds / rows
        )

    def next_pass(self) -> tuple[ForwardPass, Sequence | None]:
        """Return the next pass, and None. If the pool is too small for a sequence, return an empty
        pass and this sequence, which the caller must end.
        """
        self.admission.admit_waiting()
        self._preempt_background()
        self._preempt_for_fairness()
        while True:
            plan = ForwardPass()
            without_cells = self._fill(plan)
            if without_cells is None:
                self.last_was_prefill = all(share.sequence.is_prefilling for share in plan.shares)
                return plan, None
            if without_cells.is_too_long or not self.preempt_one():
                return ForwardPass(), without_cells

    def preempt_one(self) -> bool:
        """Preempt a running sequence (SchedulerState.preemption_rank) to free its cells. Return False
        when preempting would not help, because only one sequence runs.

        A single sequence is preempted only to make stranded cells of idle slots evictable.
        """
        if len(self.running) < 2 and not self.ledger.has_stranded_cells:
            return False
        self._preempt(max(self.running.values(), key=self.state.preemption_rank))
        return True

    def _preempt_for_fairness(self) -> None:
        """If a client without running answers has waited for long, preempt the youngest answer of
        the client with the most, which keeps at least one, and admit waiting requests again. A
        request whose beginning is being read from the disk needs no slot yet.
        """
        if not self.waiting or len(self.running) < 2 or not self.ledger.keeps_idle:
            return
        late = [
            sequence
            for sequence in self.waiting.late_sequences(self.state.n_passes, self.running.values())
            if not (self.admission.names_slot(sequence) or sequence.disk_read.is_loading)
        ]
        if not late:
            return
        priority = max(sequence.request.priority for sequence in late)
        n_answers = Counter(sequence.request.client for sequence in self.running.values())
        candidates = [
            sequence
            for sequence in self.running.values()
            if n_answers[sequence.request.client] > 1 and sequence.request.priority <= priority
        ]
        if candidates:
            self._preempt(max(candidates, key=self.state.preemption_rank))
            self.admission.admit_waiting()

    def _preempt_background(self) -> None:
        """Preempt background requests, the youngest first, while another request waits."""
        background = [
            sequence for sequence in self.running.values() if sequence.request.is_background
        ]
        while background and self.waiting.has_foreground:
            self._preempt(background.pop())
            self.admission.admit_waiting()

    def _preempt(self, sequence: Sequence) -> None:
        """Take the slots of a running sequence, store its state or drop it, and add the sequence to
        the waiting queue again.
        """
        ledger, slot = self.ledger, sequence.slot
        del self.running[sequence.id]
        if sequence.strategy.slots > 1:
            sequence.strategy.restart(sequence)
            for branch_slot in sequence.branch_slots:
                ledger.trim(branch_slot, 0)
                ledger.release(branch_slot)
        else:
            sequence.preemption.state = self.swap.swap_out(slot)
        ledger.release(slot, sequence.request.turn)
        sequence.slot, sequence.branch_slots, sequence.n_computed = -1, [], 0
        sequence.draft = NO_DRAFT
        sequence.preemption.count += 1
        self.n_preemptions += 1
        self.add(sequence)
        if not ledger.keeps_idle and not ledger.has_stranded_cells:
            ledger.compact()

    @contextmanager
    def decodes_offloaded(self, plan: ForwardPass) -> Iterator[None]:
        """If a pass is long, offload the cells of running answers that are not in it while the
        block computes the pass. They would slow the pass down.
        """
        if not self.prefill.can_offload_decodes(len(plan.tokens)):
            yield
            return
        slots = set(plan.slots)
        others = [
            sequence
            for sequence in self.running.values()
            if sequence.slot not in slots and sequence.strategy.slots == 1
        ]
        offloaded = [sequence.slot for sequence in others]
        if not self.decode_offload.is_worth(offloaded, len(plan.tokens)):
            offloaded = []
        try:
            with self.decode_offload.offload_slots(offloaded):
                yield
        finally:
            for sequence in others:
                n_cached = len(self.ledger.tokens[sequence.slot])
                sequence.n_computed = min(sequence.n_computed, n_cached)

    def _fill(self, plan: ForwardPass) -> Sequence | None:
        """Add the rows of the next pass to `plan`. Return None, or the sequence for whose rows
        there are no cells.
        """
        context, ledger = self.context, self.ledger
        decoding, prompts = self._in_serving_order()
        is_alone, n_decoding = len(self.running) == 1, len(decoding)
        separate, prompts = self.prefill.split(decoding, prompts)
        if separate and not (self.last_was_prefill and (decoding or prompts)):
            without_cells = self.prefill.fill(plan, separate, n_decoding)
            if plan.tokens:
                return without_cells
        for sequence in decoding:
            self.overflow.apply(sequence, len(plan.tokens))
            if sequence.is_too_long:
                return sequence
            n_left = len(sequence.tokens) - sequence.n_computed
            free_rows = context.n_batch - len(plan.tokens)
            count = min(n_left, free_rows) or len(sequence.strategy.pending_rows())
            if not free_rows or count > free_rows:
                continue
            if not ledger.make_room(len(plan.tokens) + count):
                return sequence
            plan.add(sequence, count, context, ledger, is_alone)
        return self.prefill.fill(plan, prompts, n_decoding) if prompts else None

    def _in_serving_order(self) -> tuple[list[Sequence], list[Sequence]]:
        """Return two lists of running sequences, each in the order in which they get rows: answers
        that need their next tokens, and sequences with many tokens to compute.
        """
        decoding: list[Sequence] = []
        prompts: list[Sequence] = []
        for sequence in self.running.values():
            (prompts if is_long(sequence) else decoding).append(sequence)
        if len(decoding) > 1:
            decoding.sort(key=lambda sequence: (-sequence.request.priority, sequence.id))
        if len(prompts) > 1:
            prompts.sort(
                key=lambda prompt: (
                    -prompt.request.priority,
                    len(prompt.tokens) - prompt.n_computed,
                    prompt.id,
                )
            )
        return decoding, prompts
