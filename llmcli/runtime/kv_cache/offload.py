"""Stores states of answers in host memory, to take their cells out of the pool.

`OffloadStore` holds all states within one byte budget. Three classes use it:

- `PreemptionSwap` stores preempted answers (those that gave up their cells to others). Later their
  states are restored or their tokens are recomputed, whichever is faster by the speeds measured so
  far.
- `IdleOffload` stores finished answers. They are offloaded when a prompt is admitted that does not
  share their cells, and restored for a prompt that starts with the same tokens.
- `DecodeOffload` stores running answers while a long piece of a prompt is computed.

Reason for offloading: for each row of a pass, llama.cpp's CPU attention visits every used cell of
the pool, including those of other sequences. The cells of idle and running answers therefore slow
down every pass. Rows of answers are also cheaper in a separate pass, because flash attention
computes rows in tiles of 64, and a tile visits the cells of all sequences in it.

Rule for dropping: idle states take at most half of the budget. The least recently used ones are
dropped when the states of preempted or running answers need the bytes. Those states are never
dropped; an answer whose state would not fit is not offloaded.

Without flash attention, llama.cpp stores the V cache by channel and copies a state in stretches of
consecutive cells, which is slow when the cells of several sequences are mixed. In that case
binding/kv_state/sequence_state.py reads the whole pool and cuts the sequence out.

Idle answers are offloaded before a new prompt is computed. Otherwise the new answer would be in
higher cells, and every row would still visit the empty cells below.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from llmcli.runtime.kv_cache.common_prefix import common_prefix
from llmcli.runtime.kv_cache.context_protocols import SwappedState
from llmcli.runtime.kv_cache.ledger import Ledger

MIN_GAINED_TOKENS = 8  # an idle state is restored only if it saves at least this many tokens
MAX_IDLE_STATES = 64  # maximum idle states; each is compared with every new prompt
NEW_WEIGHT = 0.25  # weight of a new measurement in the moving averages
MIN_TIMED_TOKENS = 32  # passes with fewer tokens are not used to measure the time per token


@dataclass(frozen=True, slots=True)
class IdleState:
    """The state of a finished answer, its scope (only prompts of this scope may reuse it), and the
    slot that it was in.
    """

    scope: str
    swapped: SwappedState
    slot: int = -1


class OffloadStore:
    """All states in host memory, at most `max_bytes` bytes together. Idle states may be dropped at
    any time, and pinned ones (of preempted and running answers) may not.
    """

    def __init__(self, ledger: Ledger, max_bytes: int) -> None:
        self.ledger, self.max_bytes = ledger, max_bytes
        self.idle: list[IdleState] = []  # least recently used first
        self.idle_bytes = 0
        self._pinned_bytes = 0  # bytes of the states that must not be dropped
        self._token_bytes = 0.0  # bytes per token of the last state; 0 before the first state

    @property
    def nbytes(self) -> int:
        """Return the bytes of all states together."""
        return self._pinned_bytes + self.idle_bytes

    @property
    def max_idle_bytes(self) -> int:
        """Return the largest number of bytes that idle states may take."""
        return self.max_bytes // 2

    def estimate_bytes(self, slot: int) -> float:
        """Return the expected bytes of the state of a slot, from the bytes per token of the last
        state. Before the first state the result is 0.
        """
        return len(self.ledger.tokens[slot]) * self._token_bytes

    def make_room(self, nbytes: float) -> bool:
        """Drop idle states until `nbytes` more bytes fit into the budget. Return False, with
        nothing dropped, when they would not fit even without idle states.
        """
        if not self.max_bytes or self._pinned_bytes + nbytes > self.max_bytes:
            return False
        self._drop_idle(self.max_bytes - nbytes)
        return True

    def swap_out(self, slot: int, all_tokens: bool = False) -> SwappedState:
        """Empty a slot and return its state, like `Ledger.swap_out`. The size of the state improves
        later estimates.
        """
        swapped = self.ledger.swap_out(slot, all_tokens)
        n_stored = len(swapped.tokens) - swapped.start
        if n_stored > MIN_GAINED_TOKENS and swapped.state:
            self._token_bytes = len(swapped.state) / n_stored
        return swapped

    def pin(self, swapped: SwappedState) -> None:
        """Count the bytes of a state that must not be dropped. Idle states are dropped if the
        budget is exceeded.
        """
        self._pinned_bytes += len(swapped.state)
        self._drop_idle(self.max_bytes)

    def unpin(self, swapped: SwappedState) -> None:
        """Stop counting the bytes of a pinned state that was restored or is no longer needed."""
        self._pinned_bytes -= len(swapped.state)

    def add_idle(self, state: IdleState) -> None:
        """Store the state of a finished answer. If the budget is exceeded, the least recently used
        idle states are dropped, possibly including the new one.
        """
        self.idle.append(state)
        self.idle_bytes += len(state.swapped.state)
        self._drop_idle(self.max_bytes)

    def pop_idle(self, number: int) -> SwappedState:
        """Remove the idle state with index `number`, and return it."""
        swapped = self.idle.pop(number).swapped
        self.idle_bytes -= len(swapped.state)
        return swapped

    def _drop_idle(self, max_bytes: float) -> None:
        """Drop the least recently used idle states until all states take at most `max_bytes`, and
        the limits of idle states are met.
        """
        while self.idle and (
            self.nbytes > max_bytes
            or self.idle_bytes > self.max_idle_bytes
            or len(self.idle) > MAX_IDLE_STATES
        ):
            self.pop_idle(0)


class PreemptionSwap:
    """Stores the states of preempted sequences. A sequence whose state does not fit into the
    budget, or is faster to recompute, is not stored.
    """

    def __init__(self, store: OffloadStore) -> None:
        self.store, self.nbytes = store, 0
        self._byte_seconds = 0.0
        self._token_seconds = 0.0

    def record_pass(self, tokens: int, seconds: float) -> None:
        """Record the duration of a pass, from which the time of recomputing a sequence is
        estimated. `tokens`: number of rows of the pass. `seconds`: wall time.
        """
        if tokens >= MIN_TIMED_TOKENS:
            self._token_seconds = _moving_average(self._token_seconds, seconds / tokens)

    def swap_out(self, slot: int) -> SwappedState | None:
        """Store the state of a slot, empty the slot and return the state. Return None when the
        sequence must be recomputed instead. The slot then keeps its cells, unless its state was
        larger than estimated and did not fit.
        """
        store, memory = self.store, self.store.ledger.memory
        count, nbytes = len(store.ledger.tokens[slot]), store.estimate_bytes(slot)
        recompute_seconds = count * self._token_seconds
        is_recompute_cheaper = 0 < recompute_seconds < 2 * nbytes * self._byte_seconds
        if not count or is_recompute_cheaper or not memory.has_complete_states:
            return None
        if not store.make_room(nbytes):
            return None
        start_time = time.perf_counter()
        swapped = store.swap_out(slot)
        if size := len(swapped.state):
            seconds = time.perf_counter() - start_time
            self._byte_seconds = _moving_average(self._byte_seconds, seconds / size)
        if not store.make_room(size):  # the state may be larger than estimated
            return None
        store.pin(swapped)
        self.nbytes += size
        return swapped

    def swap_in(self, slot: int, swapped: SwappedState) -> bool:
        """Restore a state into an empty slot, and remove it from the store. Return False when it
        cannot be restored, and the sequence must be recomputed.
        """
        self.drop(swapped)
        return self.store.ledger.swap_in(slot, swapped)

    def drop(self, swapped: SwappedState) -> None:
        """Remove a state that will not be restored from the store."""
        self.store.unpin(swapped)
        self.nbytes -= len(swapped.state)


class IdleOffload:
    """Stores the states of finished answers, so that later prompts can continue them."""

    def __init__(self, store: OffloadStore) -> None:
        self.store = store

    def __len__(self) -> int:
        return len(self.store.idle)

    @property
    def nbytes(self) -> int:
        """Return the bytes of all idle states."""
        return self.store.idle_bytes

    def offload_idle(self, max_cells: int) -> None:
        """Offload idle slots, least recently used first, until at most `max_cells` cells in the
        pool belong only to idle slots. A slot whose state would exceed the byte limit stays in the
        pool.
        """
        ledger = self.store.ledger
        for slot in ledger.reusable_slots:
            if ledger.used_cells - ledger.busy_cells <= max_cells:
                break
            self._offload(slot)
        self.store.make_room(0)

    def _offload(self, slot: int) -> None:
        """Move one idle slot to the store. A state of few tokens is not stored, because it would
        save too little.
        """
        store, ledger = self.store, self.store.ledger
        if store.estimate_bytes(slot) > store.max_idle_bytes:
            return
        scope = ledger.scopes[slot]
        swapped = store.swap_out(slot, all_tokens=not ledger.memory.has_complete_states)
        if len(swapped.tokens) - swapped.start > MIN_GAINED_TOKENS:
            store.add_idle(IdleState(scope, swapped, slot))

    def restore_prefix(self, tokens: Sequence[int], scope: str) -> None:
        """Restore the idle state with the longest common prefix with `tokens` into an idle slot, if
        this prefix is at least MIN_GAINED_TOKENS longer than the longest prefix in the pool. This
        is repeated, because another state may continue the restored one.
        """
        store, ledger = self.store, self.store.ledger
        while (
            store.idle and ledger.n_idle and (number := self._find_state(tokens, scope)) is not None
        ):
            swapped = store.pop_idle(number)
            slot = ledger.claim_slot(scope)
            is_restored = ledger.swap_in(slot, swapped)
            ledger.release(slot)
            if not is_restored:
                return

    def restore_slot(self, slot: int) -> None:
        """Move the state that was offloaded last from an idle slot back into it, if it is empty."""
        store, ledger = self.store, self.store.ledger
        number = self._last_of(slot)
        if number is None or ledger.tokens[slot] or ledger.is_busy(slot):
            return
        scope, swapped = store.idle[number].scope, store.pop_idle(number)
        ledger.claim_named_slot(slot, swapped.tokens, scope)
        ledger.swap_in(slot, swapped)
        ledger.release(slot)

    def drop_slot(self, slot: int) -> int:
        """Drop the states that were offloaded from a slot. Return the tokens of the last one."""
        count = 0
        while (number := self._last_of(slot)) is not None:
            count = count or len(self.store.idle[number].swapped.tokens)
            self.store.pop_idle(number)
        return count

    def _last_of(self, slot: int) -> int | None:
        """Return the index of the state that was offloaded last from a slot, or None."""
        numbers = (n for n, state in enumerate(self.store.idle) if state.slot == slot)
        return max(numbers, default=None)

    def _find_state(self, tokens: Sequence[int], scope: str) -> int | None:
        """Return the index of the idle state to restore. Return None when no state saves enough
        tokens.
        """
        ledger, wanted = self.store.ledger, tokens[:-1]
        n_cached = ledger.match_prefix(tokens, scope)[0]
        # a state that cannot be cut is useful only if the prompt continues all of it
        needs_whole = not ledger.can_fork
        lengths = [
            (length, number)
            for number, state in enumerate(self.store.idle)
            if state.scope == scope
            and state.swapped.start <= n_cached
            and (length := common_prefix(state.swapped.tokens, wanted))
            >= n_cached + MIN_GAINED_TOKENS
            and not (needs_whole and length < len(state.swapped.tokens))
        ]
        return max(lengths)[1] if lengths else None


class DecodeOffload:
    """Takes the cells of running answers out of the pool while the pass of another sequence is
    computed.
    """

    def __init__(self, store: OffloadStore) -> None:
        self.store = store

    @contextmanager
    def offload_slots(self, slots: Sequence[int]) -> Iterator[None]:
        """Offload the cells that only one of these slots uses, as far as the budget allows, and
        restore them at the end of the block. If the cells then no longer fit into the pool, the
        slot stays empty and its answer must be recomputed.
        """
        store, offloaded = self.store, []
        for slot in slots:
            if store.make_room(store.estimate_bytes(slot)):
                swapped = store.swap_out(slot)
                store.pin(swapped)
                offloaded.append((slot, swapped))
        try:
            yield
        finally:
            # in reverse, because a later state may contain a prefix that an earlier one leaves out
            for slot, swapped in reversed(offloaded):
                store.unpin(swapped)
                store.ledger.swap_in(slot, swapped)


def _moving_average(average: float, value: float) -> float:
    """Return the moving average after one more measurement `value`. An `average` of 0 means that
    there was no measurement before.
    """
    return average + NEW_WEIGHT * (value - average) if average else value
