"""States of answers in host memory instead of the pool: one store, one byte budget, three callers.

- `PreemptionSwap`: answers that were preempted. Swapping moves the bytes twice, recomputing costs
  the sequence's tokens; both speeds are measured while running, and the cheaper way is taken.
- `IdleOffload`: finished answers, which are offloaded when a prompt is admitted that does not share
  their cells, and restored for a prompt that starts with the same tokens.
- `DecodeOffload`: running answers while a long piece of a prompt is computed.

Why idle and running answers are offloaded: llama.cpp's CPU attention steps over every used cell of
the pool for each row, whichever sequence owns it, so cells of others slow down every pass. Rows of
answers are also cheaper in a separate pass, because one tile of 64 rows visits all cells of the
sequences in it.

Drop rule: idle states take at most half of the budget, and the least recently used are dropped when
others need the bytes. States of preempted and running answers are never dropped; one that does not
fit beside them is not made.

Without flash attention, values are stored by channel and a state is copied in stretches of
consecutive cells, which is slow when cells of several sequences are mixed.
binding/sequence_state.py then reads the whole pool and cuts the sequence out. Offloading idle
answers after the prompts instead would leave running answers in higher cells, and every row would
still step over the empty ones below.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from llmcli.runtime.kv_cache.common_prefix import common_prefix
from llmcli.runtime.kv_cache.context_protocols import SwappedState
from llmcli.runtime.kv_cache.ledger import Ledger

MIN_GAINED_TOKENS = 8  # tokens that must be gained before an idle state is restored
MAX_IDLE_STATES = 64  # each is compared with every new prompt
NEW_WEIGHT = 0.25  # of a new measurement in the moving averages
MIN_TIMED_TOKENS = 32  # tokens of a pass from which its time per token is representative


@dataclass(frozen=True, slots=True)
class IdleState:
    """The state of a finished answer, and the scope in which it may be shared."""

    scope: str
    swapped: SwappedState


class OffloadStore:
    """The states outside the pool, up to `max_bytes`."""

    def __init__(self, ledger: Ledger, max_bytes: int) -> None:
        self.ledger, self.max_bytes = ledger, max_bytes
        self.idle: list[IdleState] = []  # least recently used first
        self.idle_bytes = 0
        self._pinned_bytes = 0  # of states that must not be dropped
        self._token_bytes = 0.0  # unknown before the first state

    @property
    def nbytes(self) -> int:
        """Return the bytes of all states."""
        return self._pinned_bytes + self.idle_bytes

    @property
    def max_idle_bytes(self) -> int:
        """Return the bytes that idle states may take."""
        return self.max_bytes // 2

    def estimate_bytes(self, slot: int) -> float:
        """Return the expected bytes of a slot's state; 0 before the first state."""
        return len(self.ledger.tokens[slot]) * self._token_bytes

    def make_room(self, nbytes: float) -> bool:
        """Drop idle states until `nbytes` bytes are free. Return False when they cannot be."""
        if not self.max_bytes or self._pinned_bytes + nbytes > self.max_bytes:
            return False
        self._drop_idle(self.max_bytes - nbytes)
        return True

    def swap_out(self, slot: int, all_tokens: bool = False) -> SwappedState:
        """Empty a slot and return its state, as `Ledger.swap_out` does."""
        swapped = self.ledger.swap_out(slot, all_tokens)
        n_own = len(swapped.tokens) - swapped.start
        if n_own > MIN_GAINED_TOKENS and swapped.state:
            self._token_bytes = len(swapped.state) / n_own
        return swapped

    def pin(self, swapped: SwappedState) -> None:
        """Count a state that must not be dropped."""
        self._pinned_bytes += len(swapped.state)
        self._drop_idle(self.max_bytes)

    def unpin(self, swapped: SwappedState) -> None:
        """Forget a state that is restored or not needed any more."""
        self._pinned_bytes -= len(swapped.state)

    def add_idle(self, state: IdleState) -> None:
        """Add the state of a finished answer; it or older ones may be dropped for the budget."""
        self.idle.append(state)
        self.idle_bytes += len(state.swapped.state)
        self._drop_idle(self.max_bytes)

    def pop_idle(self, number: int) -> SwappedState:
        """Remove and return the idle state of this index."""
        swapped = self.idle.pop(number).swapped
        self.idle_bytes -= len(swapped.state)
        return swapped

    def _drop_idle(self, max_bytes: float) -> None:
        """Drop idle states until all states take at most `max_bytes`."""
        while self.idle and (
            self.nbytes > max_bytes
            or self.idle_bytes > self.max_idle_bytes
            or len(self.idle) > MAX_IDLE_STATES
        ):
            self.pop_idle(0)


class PreemptionSwap:
    """The states of preempted sequences; what does not fit the budget is recomputed."""

    def __init__(self, store: OffloadStore) -> None:
        self.store, self.nbytes = store, 0
        self._byte_seconds = 0.0
        self._token_seconds = 0.0

    def record_pass(self, tokens: int, seconds: float) -> None:
        """Record the duration of a pass. `tokens`: its rows; `seconds`: wall time."""
        if tokens >= MIN_TIMED_TOKENS:
            self._token_seconds = _moving_average(self._token_seconds, seconds / tokens)

    def swap_out(self, slot: int) -> SwappedState | None:
        """Empty a slot and return its state, or None when it shall be recomputed; the slot then
        keeps its cells, unless its first state turned out too large.
        """
        store, memory = self.store, self.store.ledger.memory
        count, nbytes = len(store.ledger.tokens[slot]), store.estimate_bytes(slot)
        recompute_seconds = count * self._token_seconds
        is_recompute_cheaper = 0 < recompute_seconds < 2 * nbytes * self._byte_seconds
        if not count or is_recompute_cheaper or not memory.has_complete_states:
            return None
        if not store.make_room(nbytes):
            return None
        begun = time.perf_counter()
        swapped = store.swap_out(slot)
        if size := len(swapped.state):
            seconds = time.perf_counter() - begun
            self._byte_seconds = _moving_average(self._byte_seconds, seconds / size)
        if not store.make_room(size):  # its size was not known exactly beforehand
            return None
        store.pin(swapped)
        self.nbytes += size
        return swapped

    def swap_in(self, slot: int, swapped: SwappedState) -> bool:
        """Restore a state into an empty slot and forget it. Return False when it cannot be restored
        and must be recomputed.
        """
        self.drop(swapped)
        return self.store.ledger.swap_in(slot, swapped)

    def drop(self, swapped: SwappedState) -> None:
        """Forget a state that will not be restored."""
        self.store.unpin(swapped)
        self.nbytes -= len(swapped.state)


class IdleOffload:
    """The states of finished answers, with the least recently used dropped first."""

    def __init__(self, store: OffloadStore) -> None:
        self.store = store

    def __len__(self) -> int:
        return len(self.store.idle)

    @property
    def nbytes(self) -> int:
        """Return the bytes of the states."""
        return self.store.idle_bytes

    def offload_idle(self, max_cells: int) -> None:
        """Offload idle slots, least recently used first, until idle cells that no busy slot shares
        number at most `max_cells`. A state above the byte limit stays in the pool.
        """
        ledger = self.store.ledger
        for slot in ledger.reusable_slots:
            if ledger.used_cells - ledger.busy_cells <= max_cells:
                break
            self._offload(slot)
        self.store.make_room(0)

    def _offload(self, slot: int) -> None:
        store, ledger = self.store, self.store.ledger
        if store.estimate_bytes(slot) > store.max_idle_bytes:
            return
        scope = ledger.scopes[slot]
        swapped = store.swap_out(slot, all_tokens=not ledger.memory.has_complete_states)
        if len(swapped.tokens) - swapped.start > MIN_GAINED_TOKENS:
            store.add_idle(IdleState(scope, swapped))

    def restore_prefix(self, tokens: Sequence[int], scope: str) -> None:
        """Restore the state with the longest common prefix with `tokens`, if the pool holds clearly
        fewer of them, and then the states that continue it.
        """
        store, ledger = self.store, self.store.ledger
        while store.idle and ledger.n_idle and (number := self._best(tokens, scope)) is not None:
            swapped = store.pop_idle(number)
            slot = ledger.claim_slot(scope)
            is_restored = ledger.swap_in(slot, swapped)
            ledger.release(slot)
            if not is_restored:
                return

    def _best(self, tokens: Sequence[int], scope: str) -> int | None:
        """Return the index of the state to restore, or None when none is worth it."""
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
    """The states of running answers while another sequence is computed."""

    def __init__(self, store: OffloadStore) -> None:
        self.store = store

    @contextmanager
    def offload_slots(self, slots: Sequence[int]) -> Iterator[None]:
        """Offload the cells that only these slots hold, as far as the budget allows, for the
        duration of the block. A slot may come back empty when cells run short.
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
            # a later state may contain the prefix of an earlier one
            for slot, swapped in reversed(offloaded):
                store.unpin(swapped)
                store.ledger.swap_in(slot, swapped)


def _moving_average(average: float, value: float) -> float:
    return average + NEW_WEIGHT * (value - average) if average else value
