"""Preempted sequences in host memory, up to a byte limit; beyond it they are recomputed.

Swapping out and in moves the state's bytes twice, recomputing costs the sequence's tokens. Both
speeds are measured while running, and the cheaper way is taken.
"""

import time

from llmcli.runtime.kv_cache.context_protocols import SwappedState
from llmcli.runtime.kv_cache.ledger import Ledger

NEW_WEIGHT = 0.25  # of a new measurement in the moving averages
MIN_TIMED_TOKENS = 32  # tokens of a pass from which its time per token is representative


class PreemptionSwap:
    """Swapped states of preempted sequences, up to `max_bytes`."""

    def __init__(self, ledger: Ledger, max_bytes: int) -> None:
        self.ledger, self.max_bytes, self.nbytes = ledger, max_bytes, 0
        self._token_bytes = 0.0  # unknown before the first swap
        self._byte_seconds = 0.0
        self._token_seconds = 0.0

    def record_pass(self, tokens: int, seconds: float) -> None:
        """Record the duration of a pass. `tokens`: its rows; `seconds`: wall time."""
        if tokens >= MIN_TIMED_TOKENS:
            each = seconds / tokens
            self._token_seconds += (
                NEW_WEIGHT * (each - self._token_seconds) if self._token_seconds else each
            )

    def swap_out(self, slot: int) -> SwappedState | None:
        """Empty a slot and return its state, or None when it shall be recomputed; the slot then
        keeps its cells.
        """
        count = len(self.ledger.tokens[slot])
        nbytes, anew = count * self._token_bytes, count * self._token_seconds
        cheaper = 0 < anew < 2 * nbytes * self._byte_seconds
        full = not self.max_bytes or self.nbytes + nbytes > self.max_bytes
        if not count or full or cheaper or not self.ledger.memory.has_complete_states:
            return None
        begun = time.perf_counter()
        away = self.ledger.swap_out(slot)
        size = len(away.state)
        if size:
            self._token_bytes = max(self._token_bytes, size / (count - away.start))
            each = (time.perf_counter() - begun) / size
            self._byte_seconds += (
                NEW_WEIGHT * (each - self._byte_seconds) if self._byte_seconds else each
            )
        if (
            self.nbytes + size > self.max_bytes
        ):  # only the size of the first state is unknown beforehand
            return None
        self.nbytes += size
        return away

    def swap_in(self, slot: int, swapped: SwappedState) -> bool:
        """Restore a state into an empty slot and forget it. Return False when it cannot be restored
        and must be recomputed.
        """
        self.drop(swapped)
        return self.ledger.swap_in(slot, swapped)

    def drop(self, swapped: SwappedState) -> None:
        """Forget a state that will not be restored."""
        self.nbytes -= len(swapped.state)
