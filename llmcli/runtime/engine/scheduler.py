"""Decides which requests run, which wait, and what the next forward pass computes.

A pass first gets the next tokens of running answers, then pieces of prompts (prefill.py). Waiting
requests start when there is room (admission.py). When cells run short nevertheless, the request
with the lowest priority (among equals, the youngest) is preempted: its cells are swapped to host
memory or recomputed later, and it resumes when there is room. A preempted beam search, which has
shown no text yet, starts again. Only a request that is too long for the whole pool ends as
context_full, unless tokens may be dropped (overflow.py).
"""

from collections.abc import Iterator
from contextlib import contextmanager

from llmcli.runtime.engine.admission import Admission
from llmcli.runtime.engine.forward_pass import ForwardPass
from llmcli.runtime.engine.overflow import OverflowHandler
from llmcli.runtime.engine.prefill import PrefillPlanner
from llmcli.runtime.engine.schedule import Schedule
from llmcli.runtime.engine.scheduler_state import SchedulerState, is_long
from llmcli.runtime.kv_cache.context_protocols import BatchedMemory
from llmcli.runtime.kv_cache.ledger import Ledger
from llmcli.runtime.kv_cache.offload import (
    DecodeOffload,
    IdleOffload,
    OffloadStore,
    PreemptionSwap,
)
from llmcli.runtime.requests.sequence import Sequence


class Scheduler:
    """Assigns slots to requests and plans forward passes."""

    def __init__(self, context: BatchedMemory, ledger: Ledger, schedule: Schedule) -> None:
        self.context, self.ledger = context, ledger
        self.state = SchedulerState(context, ledger, schedule)
        self.running, self.waiting = self.state.running, self.state.waiting
        self.offload_store = OffloadStore(ledger, schedule.offload_bytes)
        self.swap = PreemptionSwap(self.offload_store)
        self.idle_offload = IdleOffload(self.offload_store)
        self.decode_offload = DecodeOffload(self.offload_store)
        self.admission = Admission(self.state, self.swap, self.idle_offload)
        self.overflow = OverflowHandler(self.state)
        self.prefill = PrefillPlanner(self.state, self.overflow)
        self.n_preemptions = 0
        self.last_was_prefill = False  # whether the last pass computed prompts only

    @property
    def schedule(self) -> Schedule:
        """Return the limits. They may only be set while nothing runs."""
        return self.state.schedule

    @schedule.setter
    def schedule(self, schedule: Schedule) -> None:
        self.state.schedule = schedule
        self.offload_store.max_bytes = schedule.offload_bytes

    @property
    def is_steady(self) -> bool:
        """Return whether no request waits and every running sequence needs only a few tokens."""
        return not self.waiting and not any(map(is_long, self.running.values()))

    def add(self, sequence: Sequence) -> None:
        """Add a sequence to the waiting queue."""
        self.waiting.add(sequence, self.state.n_passes)

    def remove(self, sequence: Sequence) -> None:
        """Remove a finished sequence; its cells stay cached for later prefix matches."""
        if sequence.slot >= 0:
            self.ledger.release(sequence.slot, sequence.request.turn)
            del self.running[sequence.id]
            return
        self.waiting.remove(sequence, self.state.n_passes)
        if sequence.preemption.state:
            self.swap.drop(sequence.preemption.state)

    def record_pass(self, rows: int, seconds: float) -> None:
        """Record the duration of a pass. `rows`: its rows; `seconds`: wall time."""
        self.state.n_passes += 1
        if self.prefill.record_pass(rows, seconds):
            self.swap.record_pass(rows, seconds)

    def next_pass(self) -> tuple[ForwardPass, Sequence | None]:
        """Return the next pass and None. If the pool is too small for a sequence, return an empty
        pass and the sequence, which must end first.
        """
        self.admission.admit_waiting()
        while True:
            plan = ForwardPass()
            without_cells = self._fill(plan)
            if without_cells is None:
                self.last_was_prefill = all(share.sequence.is_prefilling for share in plan.shares)
                return plan, None
            is_too_long = len(without_cells.tokens) > self.context.n_ctx
            if is_too_long or not self.preempt_one():
                return ForwardPass(), without_cells

    def preempt_one(self) -> bool:
        """Preempt the least important sequence to free cells. Return False when only one sequence
        runs and no idle cells are stranded.
        """
        if len(self.running) < 2 and not self.ledger.has_stranded_cells:
            return False
        running = self.running.values()
        self._preempt(max(running, key=lambda sequence: (-sequence.request.priority, sequence.id)))
        return True

    def _preempt(self, sequence: Sequence) -> None:
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
        sequence.slot, sequence.branch_slots, sequence.draft, sequence.n_computed = -1, [], [], 0
        sequence.preemption.count += 1
        self.n_preemptions += 1
        self.add(sequence)
        if not ledger.keeps_idle and not ledger.has_stranded_cells:
            ledger.compact()

    @contextmanager
    def decodes_offloaded(self, plan: ForwardPass) -> Iterator[None]:
        """Offload the cells of decoding sequences that are not in a pass while the block computes
        it, if the pass is long enough.
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
        try:
            with self.decode_offload.offload_slots([sequence.slot for sequence in others]):
                yield
        finally:
            for sequence in others:
                n_cached = len(self.ledger.tokens[sequence.slot])
                sequence.n_computed = min(sequence.n_computed, n_cached)

    def _fill(self, plan: ForwardPass) -> Sequence | None:
        """Add the rows of the next pass to `plan`. Return the sequence that has no cells for its
        rows, or None.
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
            if len(sequence.tokens) > context.n_ctx:
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
        """Return two lists of running sequences: answers that are decoded, and sequences with many
        tokens to compute. Each list is in serving order.
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
