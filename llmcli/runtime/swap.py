"""Where answers lie that gave way in a full pool: outside it, within a bound, or nowhere, to be
computed anew.

Taking a state out and putting it back costs its bytes twice, computing it anew its tokens; both
speeds are measured as they come. On CPUs it is no question: 2,000 tokens in 10 ms against 9.8 s
(SmolLM2-135M on one thread).
"""

import time

from llmcli.runtime.ledger import Ledger
from llmcli.runtime.pool import Away

WEIGHT = 0.25  # of a new measurement
MANY = 32  # tokens of a pass that tell what a token costs


class Swap:
    """States outside the pool; `most` bytes of them."""

    def __init__(self, ledger: Ledger, most: int) -> None:
        self.ledger, self.most, self.nbytes = ledger, most, 0
        self._token_bytes = 0.0  # not known before the first
        self._byte_seconds = 0.0
        self._token_seconds = 0.0

    def computed(self, tokens: int, seconds: float) -> None:
        """A pass of so many tokens took so long."""
        if tokens >= MANY:
            each = seconds / tokens
            self._token_seconds += (
                WEIGHT * (each - self._token_seconds) if self._token_seconds else each
            )

    def out(self, slot: int) -> Away | None:
        """Empty a slot and keep what it held; None where it is to be computed anew, from what the
        slot still holds.
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
        if self.nbytes + size > self.most:  # only the first one's size is not known beforehand
            return None
        self.nbytes += size
        return away

    def back(self, slot: int, away: Away) -> bool:
        """Let an empty slot hold it again; False where it cannot: it is computed anew then. It is
        gone from here.
        """
        self.drop(away)
        return self.ledger.bring_back(slot, away)

    def drop(self, away: Away) -> None:
        """Nobody will want it."""
        self.nbytes -= len(away.state)
