"""Moves the cells of answers between the pool and the store in host memory (offload_store.py).

- `PreemptionSwap` stores preempted answers (those that gave up their cells to others). Later their
  states are restored or their tokens are recomputed, whichever is faster by the speeds measured so
  far.
- `IdleOffload` stores finished answers, and restores them for a prompt that starts with the same
  tokens. They stay in the pool as long as it has room for all answers. They are stored when their
  slot or their cells are needed, or when leaving them in the pool would cost more time than copying
  them (`Schedule.idle_offload`).
- `DecodeOffload` stores running answers while a long piece of a prompt is computed.

Reason for offloading while the pool has room: for each row of a pass, llama.cpp's CPU attention
visits every used cell of the pool, including those of other sequences. Rows of answers are also
cheaper in a separate pass, because flash attention computes rows in tiles of 64, and a tile visits
the cells of all sequences in it.

Idle answers are offloaded before a new prompt is computed. Otherwise the new answer would be in
higher cells, and every row would still visit the empty cells below.

Without flash attention, llama.cpp stores the V cache by channel and copies a state in stretches of
consecutive cells, which is slow when the cells of several sequences are mixed. In that case
binding/kv_state/sequence_state.py reads the whole pool and cuts the sequence out.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from llmcli.runtime.kv_cache.context_protocols import SwappedState
from llmcli.runtime.kv_cache.offload_cost import IdleCellCost, is_worth_clearing, is_worth_storing
from llmcli.runtime.kv_cache.offload_store import IdleState, OffloadStore


class PreemptionSwap:
    """Stores the states of preempted sequences. A sequence whose state does not fit into the
    budget, or is faster to recompute, is not stored.
    """

    def __init__(self, store: OffloadStore) -> None:
        self.store, self.nbytes = store, 0

    def swap_out(self, slot: int) -> SwappedState | None:
        """Store the state of a slot, empty the slot and return the state. Return None when the
        sequence must be recomputed instead. The slot then keeps its cells, unless its state was
        larger than estimated and did not fit.
        """
        store, memory = self.store, self.store.ledger.memory
        count = len(store.ledger.tokens[slot])
        nbytes = store.estimate_bytes(count)
        is_worth = is_worth_storing(store.costs.of_state(count, nbytes))
        if not count or not is_worth or not memory.has_complete_states:
            return None
        if not store.make_room(nbytes):
            return None
        swapped = store.swap_out(slot)
        if swapped is None:
            return None
        store.pin(swapped)
        if store.nbytes > store.max_bytes:  # the state may be larger than estimated
            store.unpin(swapped)
            return None
        self.nbytes += len(swapped.state)
        return swapped

    def swap_in(self, slot: int, swapped: SwappedState) -> bool:
        """Restore a state into an empty slot, and remove it from the store. Return False when it
        cannot be restored, and the sequence must be recomputed.
        """
        self.drop(swapped)
        return self.store.swap_in(slot, swapped)

    def drop(self, swapped: SwappedState) -> None:
        """Remove a state that will not be restored from the store."""
        self.store.unpin(swapped)
        self.nbytes -= len(swapped.state)


class IdleOffload:
    """Stores the states of finished answers, so that later prompts can continue them."""

    def __init__(self, store: OffloadStore) -> None:
        self.store = store
        store.ledger.before_loss = self.save

    def __len__(self) -> int:
        return len(self.store.idle)

    @property
    def nbytes(self) -> int:
        """Return the bytes of all idle states."""
        return self.store.idle_bytes

    def save(self, slot: int, keep: int) -> bool:
        """Store the state of an idle slot, which is about to lose its cells after the first `keep`.
        Return whether the slot is done: its state is stored, or is in the pool elsewhere. If
        `keep` is 0, the slot is empty then.
        """
        store, ledger = self.store, self.store.ledger
        store.before_offload(slot)
        count, start = len(ledger.tokens[slot]), ledger.shared_length(slot)
        if start == count:
            return keep > 0 or ledger.trim(slot, 0) == 0
        nbytes = store.estimate_bytes(count - (0 if keep else start))
        n_lost = count - max(start, keep)
        cost = store.costs.of_state(n_lost, nbytes, store.costs.reuse_chance)
        if not self._can_store() or not is_worth_storing(cost) or not store.make_room(nbytes):
            return False
        swapped = store.copy_state(slot) if keep else store.swap_out(slot, is_idle=True)
        self._add(slot, swapped)
        return swapped is not None or not keep

    def clear_pool(self) -> None:
        """Store all idle slots, least recently used first, to make passes faster. Nothing is
        dropped for their states: a slot whose state does not fit stays in the pool.
        """
        store, ledger = self.store, self.store.ledger
        if not self._can_store():
            return
        for slot in ledger.reusable_slots:
            store.before_offload(slot)
            n_stored = len(ledger.tokens[slot]) - ledger.shared_length(slot)
            if not n_stored:  # all its cells are also in another slot
                ledger.trim(slot, 0)
            elif store.has_room(store.estimate_bytes(n_stored)):
                self._add(slot, store.swap_out(slot, is_idle=True))

    def slows_down(self, prefill_rows: int, max_tokens: int | None) -> bool:
        """Return whether the idle cells in the pool would cost an answer more time than copying
        them. `prefill_rows`: tokens of its prompt that are still to be computed. `max_tokens`: the
        largest number of tokens of the answer.
        """
        ledger, costs = self.store.ledger, self.store.costs
        cells = ledger.used_cells - ledger.busy_cells
        expected = costs.answer_tokens
        has_cost = costs.prefill.cell_seconds or costs.decode.cell_seconds
        if has_cost and not costs.byte_seconds and self._can_store():
            self._time_copy()
        return is_worth_clearing(
            IdleCellCost(
                cells=cells,
                nbytes=self.store.estimate_bytes(cells),
                byte_seconds=costs.byte_seconds,
                prefill_rows=prefill_rows,
                decode_rows=expected if max_tokens is None else min(expected, max_tokens),
                prefill_cell_seconds=costs.prefill.cell_seconds,
                decode_cell_seconds=costs.decode.cell_seconds,
            )
        )

    def restore_prefix(self, tokens: Sequence[int], scope: str) -> None:
        """Restore the idle state with the longest common prefix with `tokens` into an idle slot, if
        this is faster than computing the tokens. This is repeated, because another state may
        continue the restored one.
        """
        store, ledger = self.store, self.store.ledger
        wanted = tokens[:-1] if store.idle else ()
        while store.idle and ledger.n_idle:
            n_cached = ledger.reusable_prefix(tokens, scope)
            number = store.find_idle(wanted, scope, n_cached, needs_whole=not ledger.can_fork)
            if number is None:
                return
            swapped = store.idle[number].swapped
            with ledger.keep_prefix(swapped.tokens[: swapped.start], scope):
                if not ledger.n_idle or swapped.n_cells > ledger.size - ledger.busy_cells:
                    return
                state = store.pop_idle(number)
                slot = ledger.claim_slot(scope)
                is_restored = store.swap_in(slot, swapped)
                ledger.release(slot)
            if not is_restored:  # the memory has no room, or refuses the state
                store.add_idle(state)
                return
            store.costs.record_use(True)

    def restore_slot(self, slot: int) -> bool:
        """Move the state that was offloaded last from an idle slot back into it, if it is empty.
        Return False if this is not possible now; the state stays in the store then.
        """
        store, ledger = self.store, self.store.ledger
        number = self._last_of(slot)
        if number is None or ledger.tokens[slot] or ledger.is_busy(slot):
            return True
        state = store.pop_idle(number)
        swapped = state.swapped
        ledger.claim_named_slot(slot, swapped.tokens, state.scope)
        if swapped.start:  # another state may have the prefix that this one leaves out
            self.restore_prefix(swapped.tokens[: swapped.start + 1], state.scope)
        with ledger.keep_prefix(swapped.tokens[: swapped.start], state.scope):
            is_restored = store.swap_in(slot, swapped)
        ledger.release(slot)
        if not is_restored:  # the pool has no room, or lacks the prefix of the state
            store.add_idle(state)
        return is_restored

    def drop_slot(self, slot: int) -> int:
        """Drop the states that were offloaded from a slot. Return the tokens of the last one."""
        count = 0
        while (number := self._last_of(slot)) is not None:
            state = self.store.pop_idle(number)
            count = count or len(state.swapped.tokens)
        return count

    def _time_copy(self) -> None:
        """Copy the state of an idle slot for which there is room, only to measure how long it
        takes.
        """
        store, ledger = self.store, self.store.ledger
        for slot in ledger.reusable_slots:
            if store.has_room(store.estimate_bytes(len(ledger.tokens[slot]))):
                store.copy_state(slot)
                return

    def _can_store(self) -> bool:
        """Return whether states of idle slots may be stored. In the reproducible mode they may not,
        because a restored state would fill holes in the pool.
        """
        ledger = self.store.ledger
        return ledger.keeps_idle and ledger.memory.has_complete_states

    def _add(self, slot: int, swapped: SwappedState | None) -> None:
        """Add the state that was read from a slot to the store, if there was memory for it."""
        if swapped is None:
            return
        self.store.add_idle(IdleState(self.store.ledger.scopes[slot], swapped, slot))

    def _last_of(self, slot: int) -> int | None:
        """Return the number of the state that was offloaded last from a slot, or None."""
        numbers = (number for number, state in self.store.idle.items() if state.slot == slot)
        return max(numbers, default=None)


class DecodeOffload:
    """Takes the cells of running answers out of the pool while the pass of another sequence is
    computed.
    """

    def __init__(self, store: OffloadStore) -> None:
        self.store = store

    def is_worth(self, slots: Sequence[int], rows: int) -> bool:
        """Return whether the cells of these slots prolong a pass of `rows` rows by more than
        copying them out and back takes. Return True while this is not measured.
        """
        costs, cells = self.store.costs, self.store.ledger.count_cells(slots)
        nbytes, cell_seconds = self.store.estimate_bytes(cells), costs.prefill.cell_seconds
        if not (costs.byte_seconds and costs.prefill.is_measured):
            return True
        return is_worth_clearing(
            IdleCellCost(cells, nbytes, costs.byte_seconds, rows, 0.0, cell_seconds, 0.0)
        )

    @contextmanager
    def offload_slots(self, slots: Sequence[int]) -> Iterator[None]:
        """Offload the cells that only one of these slots uses, as far as the budget allows without
        dropping other states, and restore them at the end of the block. If the cells then no longer
        fit into the pool, the slot stays empty and its answer must be recomputed.
        """
        store, offloaded = self.store, list[tuple[int, SwappedState]]()
        for slot in slots:
            if store.has_room(store.estimate_bytes(len(store.ledger.tokens[slot]))):
                swapped = store.swap_out(slot)
                if swapped is None:
                    continue
                store.pin(swapped)
                if store.nbytes > store.max_bytes:  # the state may be larger than estimated
                    self._restore(slot, swapped)
                else:
                    offloaded.append((slot, swapped))
        try:
            yield
        finally:
            # in reverse, because a later state may contain a prefix that an earlier one leaves out
            for slot, swapped in reversed(offloaded):
                self._restore(slot, swapped)

    def _restore(self, slot: int, swapped: SwappedState) -> None:
        """Restore an offloaded state into its slot, which stays empty if the pool has no room."""
        self.store.unpin(swapped)
        self.store.swap_in(slot, swapped)
