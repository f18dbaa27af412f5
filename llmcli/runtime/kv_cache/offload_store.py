"""The store of states in host memory: all states within one byte budget, and the measured costs by
which states are stored and restored (offload_cost.py).

A state is idle (of a finished answer) or pinned (of a preempted or running answer). Pinned states
are never dropped. Of the idle ones, the least recently used are dropped when a state that must
leave the pool needs their bytes, and then the checkpoints of slots. Nothing is dropped for a state
that leaves the pool only to make passes faster. Checkpoints take at most half of the budget. A new
one takes the place of those of idle states, and then of those of the least recently used slot.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from llmcli.runtime.kv_cache.attention_cost import AttentionCost
from llmcli.runtime.kv_cache.context_protocols import SwappedState
from llmcli.runtime.kv_cache.ledger import Ledger
from llmcli.runtime.kv_cache.offload_cost import StateCost, is_worth_restoring
from llmcli.runtime.kv_cache.radix_tree import RadixTree

CHECKPOINT_SHARE = 2  # checkpoints take at most half of the budget
MEASURE_SECONDS = 5.0  # time between two measurements of the budget
NEW_WEIGHT = 0.25  # weight of a new measurement in the moving averages
MIN_TIMED_TOKENS = 32  # passes and states of fewer tokens are not timed
USE_WEIGHT = 1 / 32  # weight of one stored state in the chance of reuse
MIN_REUSE_CHANCE = 1 / 32  # so that a server whose clients change is noticed


@dataclass(frozen=True, slots=True)
class IdleState:
    """The state of a finished answer, its scope (only prompts of this scope may reuse it), and the
    slot that it was in.
    """

    scope: str
    swapped: SwappedState
    slot: int = -1


@dataclass(slots=True)
class MeasuredCosts:
    """Measured times in seconds, which are 0 before the first measurement.

    - `token_seconds`: computing a token in a pass of many rows. `byte_seconds`: copying a byte of a
      state.
    - `answer_tokens`: the mean length of an answer.
    - `reuse_chance`: how often a stored state was used before it was dropped.
    - `prefill`, `decode`: the cost of other cells in passes of many rows and of one row.
    """

    token_seconds: float = 0.0
    byte_seconds: float = 0.0
    answer_tokens: float = 0.0
    reuse_chance: float = 0.5
    prefill: AttentionCost = field(default_factory=AttentionCost)
    decode: AttentionCost = field(default_factory=AttentionCost)

    def record_pass(self, tokens: int, seconds: float) -> None:
        """Record the duration of a pass, from which the time of computing tokens again is
        estimated. `tokens`: number of rows of the pass. `seconds`: wall time.
        """
        if tokens >= MIN_TIMED_TOKENS:
            self.token_seconds = moving_average(self.token_seconds, seconds / tokens)

    def record_answer(self, tokens: int) -> None:
        """Record the number of tokens of a finished answer."""
        self.answer_tokens = moving_average(self.answer_tokens, tokens)

    def record_use(self, is_used: bool) -> None:
        """Record whether a stored state was used, or dropped without use."""
        chance = self.reuse_chance + USE_WEIGHT * (is_used - self.reuse_chance)
        self.reuse_chance = max(MIN_REUSE_CHANCE, chance)

    def record_copy(self, nbytes: int, seconds: float) -> None:
        """Record how long copying a state of `nbytes` bytes took."""
        self.byte_seconds = moving_average(self.byte_seconds, seconds / nbytes)

    def of_state(self, tokens: int, nbytes: float, reuse_chance: float = 1.0) -> StateCost:
        """Return the cost of a state that saves `tokens` tokens and has `nbytes` bytes."""
        return StateCost(tokens, nbytes, self.token_seconds, self.byte_seconds, reuse_chance)


class OffloadStore:
    """All states in host memory, at most `max_bytes` bytes together."""

    def __init__(self, ledger: Ledger, token_bytes: float = 0.0) -> None:
        """`token_bytes`: bytes of a token in the cache; 0 if unknown before the first state."""
        self.ledger = ledger
        self.max_bytes = self._most_bytes = 0
        self._measure_budget: Callable[[int], int] | None = None
        self._measured_at = 0.0
        self.costs = MeasuredCosts()
        self.idle: dict[int, IdleState] = {}  # by number, least recently used first
        self.idle_bytes = 0
        self._n_stored = 0
        self._tree = RadixTree()  # of the idle states
        self._pinned: dict[int, SwappedState] = {}  # by id()
        self._token_bytes = token_bytes
        # Returns the bytes of further states in host memory: those on their way to or from the disk
        # (disk_cache/).
        self.other_bytes: Callable[[], int] = lambda: 0
        # Called with an idle slot before its state leaves the pool.
        self.before_offload: Callable[[int], None] = lambda slot: None
        ledger.before_checkpoint = self.make_checkpoint_room
        ledger.after_memory_error = self.lower_budget

    @property
    def nbytes(self) -> int:
        """Return the bytes of all states and checkpoints together."""
        held_bytes = self._pinned_state_bytes + self.idle_bytes + self.ledger.checkpoints.nbytes
        return held_bytes + self.other_bytes()

    @property
    def _pinned_state_bytes(self) -> int:
        """Return the bytes of the pinned states without their checkpoints."""
        return sum(len(swapped.state) for swapped in self._pinned.values())

    @property
    def _pinned_checkpoint_bytes(self) -> int:
        """Return the bytes of the checkpoints of pinned states, which are not dropped either."""
        checkpoints = {one for swapped in self._pinned.values() for one in swapped.checkpoints}
        return sum(len(checkpoint.state) for checkpoint in checkpoints)

    def set_budget(
        self, max_bytes: int, measure_budget: Callable[[int], int] | None = None
    ) -> None:
        """Change the budget. Idle states that exceed it are dropped. `measure_budget`: returns the
        budget at the moment, for the number of bytes that the states take; it can only lower
        `max_bytes`.
        """
        self.max_bytes = self._most_bytes = max_bytes
        self._measure_budget, self._measured_at = measure_budget, time.monotonic()
        self._drop_idle(max_bytes)

    def _update_budget(self) -> None:
        """Measure the budget again if the last measurement is old."""
        now = time.monotonic()
        if self._measure_budget is None or now - self._measured_at < MEASURE_SECONDS:
            return
        self._measured_at = now
        self.max_bytes = min(self._most_bytes, self._measure_budget(self.nbytes))
        self._drop_idle(self.max_bytes)

    def estimate_bytes(self, tokens: int) -> float:
        """Return the expected bytes of a state of `tokens` tokens, by the size of the last state."""
        return tokens * self._token_bytes

    def has_room(self, nbytes: float) -> bool:
        """Return whether `nbytes` more bytes fit into the budget, with nothing dropped for them."""
        self._update_budget()
        return self.max_bytes > 0 and self.nbytes + nbytes <= self.max_bytes

    def make_checkpoint_room(self, nbytes: int) -> bool:
        """Drop checkpoints and idle states until a checkpoint of `nbytes` bytes fits into the
        budget. Return False, with nothing dropped for it, when it would not fit even then.
        """
        self._update_budget()
        checkpoints, most = self.ledger.checkpoints, self.max_bytes // CHECKPOINT_SHARE
        if not most or self._pinned_checkpoint_bytes + nbytes > most or not self._can_fit(nbytes):
            return False
        while checkpoints.nbytes + nbytes > most and self._drop_checkpoint():
            pass
        return checkpoints.nbytes + nbytes <= most and self.make_room(nbytes)

    def _drop_checkpoint(self) -> bool:
        """Drop the oldest idle state with a checkpoint that no slot has, or a checkpoint of a slot.
        If idle states need all of these, drop the oldest of the states. Return whether there was
        anything to drop.
        """
        in_slots = self.ledger.checkpoints.in_slots
        holders = [number for number, state in self.idle.items() if state.swapped.checkpoints]
        for number in holders:
            if not in_slots.issuperset(self.idle[number].swapped.checkpoints):
                return self._drop_state(number)
        return self.ledger.drop_checkpoint() or (bool(holders) and self._drop_state(holders[0]))

    def _can_fit(self, nbytes: float) -> bool:
        """Return whether `nbytes` more bytes fit into the budget beside what is never dropped."""
        return self._pinned_state_bytes + self._pinned_checkpoint_bytes + nbytes <= self.max_bytes

    def make_room(self, nbytes: float) -> bool:
        """Drop idle states and checkpoints until `nbytes` more bytes fit into the budget. Return
        False, with nothing dropped for them, when they would not fit even then.
        """
        self._update_budget()
        if not self.max_bytes or not self._can_fit(nbytes):
            return False
        self._drop_idle(self.max_bytes - nbytes)
        return self.nbytes + nbytes <= self.max_bytes

    def swap_out(self, slot: int, is_idle: bool = False) -> SwappedState | None:
        """Empty a slot and return its state, like `Ledger.swap_out`. Return None if the system has
        no memory for the state; the slot is empty then, too.
        """
        start_time = time.perf_counter()
        try:
            swapped = self.ledger.swap_out(slot, is_idle)
        except MemoryError:
            self.lower_budget()
            return None
        return self._record(swapped, start_time)

    def copy_state(self, slot: int) -> SwappedState | None:
        """Return the whole state of a slot, which stays in the pool. Return None if the system has
        no memory for it.
        """
        start_time = time.perf_counter()
        try:
            swapped = self.ledger.copy_state(slot)
        except MemoryError:
            self.lower_budget()
            return None
        return self._record(swapped, start_time)

    def lower_budget(self) -> None:
        """Lower the budget for good, because the system had no memory for another state."""
        self.max_bytes = self._most_bytes = self.nbytes

    def swap_in(self, slot: int, swapped: SwappedState) -> bool:
        """Restore a state into an empty slot, like `Ledger.swap_in`. Its checkpoints then are those
        of the slot, for which other states may be dropped.
        """
        start_time = time.perf_counter()
        is_restored = self.ledger.swap_in(slot, swapped)
        if is_restored:
            self._record(swapped, start_time)
            self._drop_idle(self.max_bytes)
        return is_restored

    def _record(self, swapped: SwappedState, start_time: float) -> SwappedState:
        """Record the size of a state and the time since `start_time`, in which it was copied.
        Return the state.
        """
        n_stored = swapped.n_cells
        if n_stored and swapped.state:
            self._token_bytes = len(swapped.state) / n_stored
            if n_stored >= MIN_TIMED_TOKENS:
                seconds = time.perf_counter() - start_time
                self.costs.record_copy(len(swapped.state), seconds)
        return swapped

    def pin(self, swapped: SwappedState) -> None:
        """Count the bytes of a state that must not be dropped. Idle states are dropped if the
        budget is exceeded.
        """
        self._pinned[id(swapped)] = swapped
        self.ledger.checkpoints.hold(swapped.checkpoints)
        self._drop_idle(self.max_bytes)

    def unpin(self, swapped: SwappedState) -> None:
        """Stop counting the bytes of a pinned state that was restored or is no longer needed."""
        del self._pinned[id(swapped)]
        self.ledger.checkpoints.release(swapped.checkpoints)

    def add_idle(self, state: IdleState) -> None:
        """Store the state of a finished answer. If the budget is exceeded, the least recently used
        idle states are dropped, possibly including the new one.
        """
        self._n_stored += 1
        self.idle[self._n_stored] = state
        self.idle_bytes += len(state.swapped.state)
        self.ledger.checkpoints.hold(state.swapped.checkpoints)
        self._tree.extend(self._n_stored, list(state.swapped.tokens), state.scope)
        self._drop_idle(self.max_bytes)

    def pop_idle(self, number: int) -> IdleState:
        """Remove the idle state with this number, and return it."""
        state = self.idle.pop(number)
        self.idle_bytes -= len(state.swapped.state)
        self.ledger.checkpoints.release(state.swapped.checkpoints)
        self._tree.truncate(number, 0)
        return state

    def idle_prefix(self, tokens: Sequence[int], scope: str) -> int:
        """Return how many of `tokens` the idle state of a scope has that begins with the most."""
        return self._tree.match(tokens, scope)[0]

    def find_idle(
        self, tokens: Sequence[int], scope: str, n_cached: int, needs_whole: bool
    ) -> int | None:
        """Return the number of the idle state that has the most of `tokens` for a prompt and is
        worth restoring, or None.

        `n_cached`: tokens of the prompt that the pool has; a state that leaves out a longer prefix
        cannot be restored. `needs_whole`: whether a state is of use only up to its end or to one of
        its checkpoints.
        """
        max_cells = self.ledger.size - self.ledger.busy_cells
        most, worth, compared = n_cached, list[int](), set[int]()
        for length, holders in self._tree.prefixes(tokens, scope):
            if length <= n_cached or length < most:
                break
            for number in holders - compared:
                swapped = self.idle[number].swapped
                usable = self._usable_length(number, length, needs_whole)
                if (
                    usable > n_cached
                    and usable >= most
                    and swapped.start <= n_cached
                    and swapped.n_cells <= max_cells
                    and self._is_worth_restoring(number, usable - n_cached)
                ):
                    worth = [*worth, number] if usable == most else [number]
                    most = usable
            compared |= holders
        # the smallest of the states; the latest of equals
        return min(
            worth,
            key=lambda number: (len(self.idle[number].swapped.state), -number),
            default=None,
        )

    def _usable_length(self, number: int, length: int, needs_whole: bool) -> int:
        """Return how many of the first `length` tokens of an idle state a prompt can use."""
        swapped = self.idle[number].swapped
        if not needs_whole or len(swapped.tokens) == length:
            return length
        lengths = (checkpoint.length for checkpoint in swapped.checkpoints)
        return max((usable for usable in lengths if usable <= length), default=0)

    def _is_worth_restoring(self, number: int, tokens: int) -> bool:
        """Return whether restoring an idle state saves time. `tokens`: tokens that it saves."""
        nbytes = len(self.idle[number].swapped.state)
        return is_worth_restoring(self.costs.of_state(tokens, nbytes))

    def _drop_idle(self, max_bytes: float) -> None:
        """Drop the least recently used idle states, and then checkpoints, until all states take at
        most `max_bytes`.
        """
        while self.idle and self.nbytes > max_bytes:
            self._drop_state(next(iter(self.idle)))
        while self.nbytes > max_bytes and self.ledger.drop_checkpoint():
            pass

    def _drop_state(self, number: int) -> bool:
        """Drop an idle state that was not used, and return True."""
        self.pop_idle(number)
        self.costs.record_use(False)
        return True


def moving_average(average: float, value: float) -> float:
    """Return the moving average after one more measurement `value`. An `average` of 0 means that
    there was no measurement before.
    """
    return average + NEW_WEIGHT * (value - average) if average else value
