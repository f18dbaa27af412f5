"""Preempted sequences in host memory, up to a byte limit; beyond it they are recomputed.

Swapping out and in moves the state's bytes twice, recomputing costs the sequence's tokens. Both
speeds are measured while running, and the cheaper way is taken.
"""

import time

from llmcli.runtime.kv_cache.context_protocols import Away
from llmcli.runtime.kv_cache.ledger import Ledger

WEIGHT = 0.25  # of a new measurement in the moving averages
MANY = 32  # tokens of a pass from which its time per token is representative


class Swap:
    """Swapped states of preempted sequences, up to `max_bytes`."""

    def __init__(self, ledger: Ledger, most: int) -> None:
        self.ledger, self.most, self.nbytes = ledger, most, 0
        self._token_bytes = 0.0  # unknown before the first swap
        self._byte_seconds = 0.0
        self._token_seconds = 0.0

    def computed(self, tokens: int, seconds: float) -> None:
        """Record the duration of a pass. `tokens`: its rows; `seconds`: wall time."""
        if tokens >= MANY:
            each = seconds / tokens
            self._token_seconds += (
                WEIGHT * (each - self._token_seconds) if self._token_seconds else each
            )

    def out(self, slot: int) -> Away | None:
        """Empty a slot and return its state, or None when it shall be recomputed; the slot then
        keeps its cells.
        """
        count = len(self.ledger.tokens[slot])
        nbytes, anew = count * self._token_bytes, count * self._token_seconds
        cheaper = 0 < anew < 2 * nbytes * self._byte_seconds
        full = not self.most or self.nbytes + nbytes > self.most
        if not count or full or cheaper or not self.ledger.memory.whole_states:
            return None
        begun = time.perf_counter()
        away = self.ledger.put_away(slot)
        size = len(away.state)
        if size:
            self._token_bytes = max(self._token_bytes, size / (count - away.start))
            each = (time.perf_counter() - begun) / size
            self._byte_seconds += (
                WEIGHT * (each - self._byte_seconds) if self._byte_seconds else each
            )
        if self.nbytes + size > self.most:  # only the size of the first state is unknown beforehand
            return None
        self.nbytes += size
        return away

    def back(self, slot: int, away: Away) -> bool:
        """Restore a state into an empty slot and forget it. Return False when it cannot be restored
        and must be recomputed.
        """
        self.drop(away)
        return self.ledger.bring_back(slot, away)

    def drop(self, away: Away) -> None:
        """Forget a state that will not be restored."""
        self.nbytes -= len(away.state)
