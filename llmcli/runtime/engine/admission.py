"""Admission: decides which waiting requests start, and in which slots.

A request is admitted when its prompt fits into the pool together with the cells in use and the
cells that running answers will soon need. If a running sequence is just computing the same
beginning of a prompt, the request waits for this prefix and then shares its cells
(`Sequence.waits_for_prefix`).
"""

from collections.abc import Callable

import numpy as np

from llmcli.runtime.disk_cache.disk_cache import DiskCache
from llmcli.runtime.disk_cache.state_loader import StateLoad
from llmcli.runtime.engine.scheduler_state import SchedulerState
from llmcli.runtime.kv_cache.common_prefix import common_prefix
from llmcli.runtime.kv_cache.offload import IdleOffload, PreemptionSwap
from llmcli.runtime.kv_cache.prefix_losses import (
    NearestConversation,
    PastConversation,
    PrefixHistory,
    PrefixLoss,
    explain_loss,
)
from llmcli.runtime.requests.sequence import Sequence, SharedPrefix

RESERVED_CELLS = 32  # cells that each running answer is expected to need soon
RESERVED_FRACTION = 8  # at most 1/8 of the pool is reserved for all running answers together
MIN_SHARED_PREFIX = 32  # tokens that two prompts must share before one waits for the other
MAX_ADMIT_TRIES = 4  # waiting requests that are tried before admission waits for the next pass
STARVATION_PASSES = 64  # passes of waiting after which no other request may overtake a request


class Admission:
    """Admits waiting requests: claims their slots and moves them to the running sequences."""

    def __init__(
        self, state: SchedulerState, swap: PreemptionSwap, idle_offload: IdleOffload
    ) -> None:
        self.state, self.ledger = state, state.ledger
        self.swap, self.idle_offload = swap, idle_offload
        self.history = PrefixHistory(self.ledger, idle_offload.store)
        # Called with a sequence that begins, if its prompt was not found in the cache as far as it
        # could be. None: conversations are not compared.
        self.on_prefix_loss: Callable[[Sequence, PrefixLoss], None] | None = None
        self.disk_cache: DiskCache | None = None

    def has_capacity(self) -> bool:
        """Return whether one more request may run under `Schedule.max_running`."""
        max_running = self.state.schedule.max_running
        return max_running is None or len(self.state.running) < max_running

    def admit_waiting(self) -> None:
        """Admit waiting requests in order until slots or cells are missing. A few requests that do
        not fit are skipped, unless one of them has waited too long.
        """
        state, ledger = self.state, self.ledger
        tried_ids: set[int] = set()
        while state.waiting and self.has_capacity() and ledger.n_idle:
            has_foreground = state.waiting.has_foreground
            candidates = (
                sequence
                for sequence in state.waiting.in_order(state.n_passes, state.running.values())
                if sequence.id not in tried_ids
                and not sequence.disk_read.is_loading
                and not (has_foreground and sequence.request.is_background)
                and not self._waits_for_prefix(sequence)
            )
            first = next(candidates, None)
            if first is None:
                return
            if self._admit(first):
                if self._must_clear_pool(first):
                    self.idle_offload.clear_pool()
                continue
            if first.disk_read.is_loading:
                continue
            tried_ids.add(first.id)
            is_starving = state.n_passes - first.preemption.waiting_since > STARVATION_PASSES
            if is_starving or len(tried_ids) == MAX_ADMIT_TRIES:
                return

    def admit_fork(self, first: Sequence, sample: Sequence) -> bool:
        """Admit a sample that starts at the end of the prompt of `first` and shares its cells.
        Return False when the sample must wait.
        """
        ledger = self.ledger
        can_claim = ledger.can_share and ledger.n_idle and not ledger.must_cut_to_claim
        if not can_claim or not self.has_capacity():
            return False
        sample.slot = ledger.claim_slot(self._sharing_scope(sample))
        try:
            ledger.fork(first.slot, sample.slot)
        except MemoryError:  # of the part of a state that is copied
            ledger.release(sample.slot)
            sample.slot = -1
            return False
        sample.n_computed = sample.accounting.n_reused = first.n_computed
        sample.accounting.prompt_seconds = first.accounting.prompt_seconds
        self.end_load(sample)
        self.state.run(sample)
        return True

    def _must_clear_pool(self, admitted: Sequence) -> bool:
        """Return whether finished answers leave the pool before the passes of a sequence that was
        just admitted.
        """
        mode = self.state.schedule.idle_offload
        if mode == "measured":
            rows = len(admitted.tokens) - admitted.n_computed
            return self.idle_offload.slows_down(rows, admitted.request.max_tokens)
        return mode == "always"

    def _sharing_scope(self, sequence: Sequence) -> str:
        """Return the scope of a sequence, within which cached cells are shared: its client, or the
        empty string if all clients share.
        """
        return "" if self.state.schedule.share_prefixes else sequence.request.client

    def _waits_for_prefix(self, sequence: Sequence) -> bool:
        """Return whether a sequence must wait for a prefix that a running sequence is computing. If
        it must, the prefix is recorded in `sequence.prefix`.
        """
        if sequence.waits_for_prefix:
            return True
        if not self.ledger.can_fork or sequence.request.score_prompt or self.names_slot(sequence):
            return False
        tokens, scope = sequence.tokens, self._sharing_scope(sequence)
        prefix_lengths = {
            other: length
            for other in self.state.running.values()
            if other.is_prefilling
            and self._sharing_scope(other) == scope
            and (length := min(_common_length(sequence, other), other.n_prompt, len(tokens) - 1))
            > other.n_computed
        }
        if not prefix_lengths:
            return False
        source = max(prefix_lengths, key=prefix_lengths.__getitem__)
        n_cached = self.ledger.match_prefix(tokens, scope, sequence.match)[0]
        if prefix_lengths[source] < n_cached + MIN_SHARED_PREFIX:
            return False
        sequence.prefix = SharedPrefix(source, prefix_lengths[source])
        return True

    def _admit(self, sequence: Sequence) -> bool:
        """Admit a waiting sequence. Return False when slots or cells are missing."""
        if self.ledger.n_idle < sequence.strategy.slots or self._must_run_alone(sequence):
            return False
        slot = sequence.request.slot if self.names_slot(sequence) else None
        if slot is not None and self.ledger.is_busy(slot):
            return False
        # before a state is restored, which would be in vain for a sequence that must wait
        if sequence.disk_read.is_loading or not self._fits(sequence):
            return False
        compares = self.on_prefix_loss is not None and not sequence.preemption.count
        scope = self._sharing_scope(sequence)
        nearest = self.history.find_nearest(sequence.tokens, scope) if compares else None
        if slot is not None:
            self.idle_offload.restore_slot(slot)
        if not sequence.preemption.state and not sequence.request.score_prompt:
            if slot is None:
                self.idle_offload.restore_prefix(sequence.tokens, scope)
            if self.disk_cache and not self._restore_from_disk(sequence, self.disk_cache, slot):
                return False
        if not self._swap_in(sequence) and not self._claim_slots(sequence):
            return False
        self.state.run(sequence)
        if compares:
            self._report_loss(sequence, nearest)
        return True

    def _report_loss(self, sequence: Sequence, nearest: NearestConversation | None) -> None:
        """Report why the prompt of a sequence that begins was not found in the cache, and keep it
        for later prompts. `nearest`: the conversation with the longest common beginning.
        """
        request, scope = sequence.request, self._sharing_scope(sequence)
        conversation = PastConversation(
            sequence.id,
            np.array(sequence.tokens, np.int32),
            request.client,
            scope,
            sequence.slot,
        )
        self.history.add(sequence.id, conversation, nearest)
        if nearest is None or self.on_prefix_loss is None:
            return
        loss = explain_loss(
            nearest,
            sequence.tokens,
            sequence.n_computed,
            is_scored=request.score_prompt,
            names_slot=self.names_slot(sequence),
            can_fork=self.ledger.can_fork,
            is_reproducible=not self.ledger.keeps_idle,
        )
        if loss:
            self.on_prefix_loss(sequence, loss)

    def _restore_from_disk(
        self, sequence: Sequence, disk_cache: DiskCache, slot: int | None
    ) -> bool:
        """Restore the beginning of a prompt from the disk, once for each sequence. `slot`: the slot
        that it names, which gets all of the beginning. Return False while it is being read.
        """
        tokens, disk_read = sequence.tokens, sequence.disk_read
        disk_read.awaited = None  # it has ended, and may hold a state
        if disk_read.is_done:
            return True
        scope = self._sharing_scope(sequence)
        if disk_read.load is None:
            disk_read.n_cached = self.ledger.reusable_prefix(tokens, scope, slot)
            if not disk_cache.is_searched(tokens, disk_read.n_cached):
                disk_read.is_done = True
                return True
            disk_read.awaited = self._find_awaited(sequence, disk_cache, slot)
            if disk_read.awaited is not None:
                return False
            disk_read.load = self._take_load(sequence, slot) or disk_cache.start_load(
                tokens[:-1], scope, disk_read.n_cached, reads_all=slot is not None
            )
        if disk_read.is_loading:
            return False
        disk_read.length = disk_cache.restore(disk_read.load, tokens, scope, slot)
        disk_read.load, disk_read.is_done = None, True
        return True

    def _find_awaited(
        self, sequence: Sequence, disk_cache: DiskCache, slot: int | None
    ) -> StateLoad | None:
        """Return the load that must end before the beginning of a sequence is read: one that reads
        the same beginning, or fills the slot that both name, or any if the loads take all idle
        slots. None: there is none. `slot`: the slot that the sequence names; it shares no beginning.
        """
        scope = self._sharing_scope(sequence)
        min_length = sequence.disk_read.n_cached + MIN_SHARED_PREFIX
        loads = [
            (other, load)
            for other in self.state.waiting
            if (load := other.disk_read.load) and load.is_running
        ]
        for other, load in loads:
            if slot is not None:
                if self.names_slot(other) and other.request.slot == slot:
                    return load
            elif (
                self._sharing_scope(other) == scope
                and _common_length(sequence, other) >= min_length
            ):
                return load
        if loads and disk_cache.loader.n_open >= self.ledger.n_idle:
            return loads[0][1]
        return None

    def _take_load(self, sequence: Sequence, slot: int | None) -> StateLoad | None:
        """Take over a load that has just ended from another waiting sequence that comes later in the
        order, if it read a beginning of this prompt. Return None if there is none.
        """
        scope = self._sharing_scope(sequence)
        for other in self.state.waiting:
            load = other.disk_read.load
            if load is None or load.is_running or load.future.exception() is not None:
                continue
            named_slot = other.request.slot if self.names_slot(other) else None
            is_shared = named_slot == slot and self._sharing_scope(other) == scope
            found = load.future.result()
            length = len(found.tokens) if found is not None else 0
            shared_length = min(_common_length(sequence, other), len(sequence.tokens) - 1)
            if is_shared and sequence.disk_read.n_cached < length <= shared_length:
                other.disk_read.load = None
                return load
        return None

    @property
    def loading(self) -> list[StateLoad]:
        """Return the running loads for which sequences wait."""
        reads = [sequence.disk_read for sequence in self.state.waiting]
        loads = (load for read in reads for load in (read.load, read.awaited))
        return [load for load in loads if load is not None and load.is_running]

    def end_load(self, sequence: Sequence) -> None:
        """End the load of a sequence that needs none any more: it is over, or shares other cells."""
        disk_read = sequence.disk_read
        if self.disk_cache and disk_read.load is not None:
            self.disk_cache.loader.end(disk_read.load)
        disk_read.load = disk_read.awaited = None

    def _swap_in(self, sequence: Sequence) -> bool:
        """Restore the stored state of a preempted sequence. Return False when it has none or it
        cannot be restored, so the sequence must be recomputed.
        """
        swapped, sequence.preemption.state = sequence.preemption.state, None
        if swapped is None:
            return False
        if self.ledger.must_cut_to_claim:
            self.ledger.compact()
        slot = self.ledger.claim_slot(self._sharing_scope(sequence))
        if not self.swap.swap_in(slot, swapped):
            self.ledger.release(slot)
            return False
        sequence.slot, sequence.n_computed = slot, len(swapped.tokens)
        return True

    def _claim_slots(self, sequence: Sequence) -> bool:
        """Claim the slots of a sequence, one of which may hold a cached prefix of its tokens.
        Return False when no slot can be claimed.
        """
        request, scope = sequence.request, self._sharing_scope(sequence)
        # A scored prompt is recomputed. No cells are reused for a prompt of one token.
        reusable = sequence.tokens[:1] if request.score_prompt else sequence.tokens
        if self.names_slot(sequence) and request.slot is not None:
            claim: tuple[int, int] | None = (
                request.slot,
                self.ledger.claim_named_slot(request.slot, reusable, scope),
            )
        else:
            claim = self.ledger.claim_slot_for(
                reusable, request.earlier_turns, request.can_move_cells, scope
            )
        if claim is None:
            return False
        sequence.slot, sequence.n_computed = claim
        if not sequence.preemption.count:
            sequence.accounting.n_reused = sequence.n_computed
            self._count_disk_tokens(sequence)
        sequence.branch_slots = [
            self.ledger.claim_slot(scope) for _ in range(sequence.strategy.slots - 1)
        ]
        return True

    def _count_disk_tokens(self, sequence: Sequence) -> None:
        """Record how many of the reused tokens of a sequence were read from the disk."""
        disk_read = sequence.disk_read
        n_tokens = min(sequence.n_computed, disk_read.length) - disk_read.n_cached
        if self.disk_cache and n_tokens > 0:
            sequence.accounting.n_from_disk = n_tokens
            self.disk_cache.record_reuse(n_tokens)

    def names_slot(self, sequence: Sequence) -> bool:
        """Return whether a sequence must run in a certain slot. In the reproducible mode none must,
        because slots are evicted and compacted together. Of several samples only the first must.
        """
        return (
            sequence.request.slot is not None
            and sequence.prefix is None
            and not sequence.preemption.count
            and self.ledger.keeps_idle
        )

    def _must_run_alone(self, sequence: Sequence) -> bool:
        """Return whether a sequence must wait until no other runs. In the reproducible mode a beam
        search must run alone, because it leaves holes in the pool, which other sequences would
        fill.
        """
        running = self.state.running
        has_search = sequence.strategy.slots > 1 or any(
            other.strategy.slots > 1 for other in running.values()
        )
        return bool(running) and not self.ledger.keeps_idle and has_search

    def _fits(self, sequence: Sequence) -> bool:
        """Return whether the tokens of a sequence fit into the pool together with the cells in use
        and those reserved for running answers.
        """
        if not self.state.running:
            return True
        ledger = self.ledger
        n_shared, is_busy = ledger.match_prefix(
            sequence.tokens, self._sharing_scope(sequence), sequence.match
        )
        can_share = is_busy and not (sequence.request.score_prompt or self.names_slot(sequence))
        needed_cells = len(sequence.tokens) - (n_shared if can_share else 0)
        n_answers = len(self.state.running) + sequence.strategy.slots
        reserved_cells = min(RESERVED_CELLS * n_answers, ledger.size // RESERVED_FRACTION)
        return ledger.busy_cells + needed_cells + reserved_cells <= ledger.size


def _common_length(sequence: Sequence, other: Sequence) -> int:
    """Return the length of the common prefix of the tokens of a waiting sequence and of another one
    whose prompt is being computed. It is compared once, because neither of them changes meanwhile.
    """
    length = sequence.common_lengths.get(other.id)
    if length is None:
        length = sequence.common_lengths[other.id] = common_prefix(other.tokens, sequence.tokens)
    return length
