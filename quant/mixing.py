"""What attention makes of the rows that enter a layer's values, for their second moments: one
matrix for each chunk.

It mixes what comes out of the values: for head h and query q o = W_v (sum over t of a_hqt x_t). The
error of W_v is felt behind that, so that its moments are those of the sum in brackets: X^T B X with
B the sum of A^T A over heads. 2026-11-22, SmolLM2-135M, attn_v of all layers at Q4_K_M's types and
nothing else quantized, KL divergence on three chunks of Wikipedia and three of plays, 24 chunks of
calibration: ggml with its imatrix .01031 and .00842; error feedback by the moments of x .01446 and
.00901, by these .00077 and .00132; by a B for each head of keys .00078 and .00130 (three times the
disk and the work); by each token's sum of a^2 instead of B .00080 and .00150. Neighbouring queries
look at nearly the same: with every second one alone (30 chunks of 512 of a Llama of hidden 512) the
error of attn_v's codes under the moments of all queries of 100 chunks was the same (+0.0 %), with
every fourth 0.6 % larger.
"""

from dataclasses import dataclass

import numpy as np

from quant.calibrate import F32, F64

# A share below this counts as this: products of two would be denormal numbers, each 100 cycles of a
# CPU. They were ten of the eleven CPU seconds that mixing took of 20 chunks of a Llama of hidden
# 512 and 4 layers (2026-11-22).
TINY = np.float32(1e-15)
EVERY = 2  # of so many queries in a row one is counted in: see above
# queries whose shares are multiplied at a time: those behind the last one that they see are zeros
STRIP = 64


@dataclass(frozen=True, slots=True)
class Mix:
    """Of the rows X of a chunk: `rows` B X, `first` the sum of all mixtures, `count` how many these
    were.
    """

    rows: F32
    first: F64
    count: int


class Mixing:
    """How one layer's values are mixed in a chunk: with A [queries, keys] for each head, the sums
    of A^T A and of A over heads and every other query, and how many these were. `rows` is where
    those of the chunk stand.
    """

    def __init__(self) -> None:
        self.pairs, self.plain, self.count = np.zeros((0, 0), np.float32), np.zeros(0), 0
        self.rows = slice(0)
        self._shares: list[F32] = []  # [heads, queries, keys] of each pass

    @property
    def waiting(self) -> int:
        """Bytes of what is not multiplied yet."""
        return sum(shares.nbytes for shares in self._shares)

    def add(self, shares: F32) -> None:
        """One pass. Copied, no more: llama.cpp waits awake meanwhile."""
        self._shares.append(counted(shares).copy())

    def settle(self) -> None:
        """Multiply what waits, in the order in which it came; the queries of a later pass have more
        keys.
        """
        for shares in self._shares:
            heads, queries, keys = shares.shape
            if (more := keys - len(self.plain)) > 0:
                self.pairs, self.plain = (
                    np.pad(self.pairs, (0, more)),
                    np.pad(self.plain, (0, more)),
                )
            for first in range(0, queries, STRIP):
                strip = shares[:, first : first + STRIP]
                end = int(np.flatnonzero(strip.max(0).max(0)).max(initial=-1)) + 1
                rows = np.maximum(strip[:, :, :end], TINY).reshape(-1, end)
                self.pairs[:end, :end] += rows.T @ rows
                self.plain[:end] += rows.sum(0)
            self.count += heads * queries
        self._shares.clear()

    def made(self, rows: F32) -> Mix:
        """What is made of the layer's rows [tokens, columns], of which those of the chunk are some."""
        self.settle()
        rows = rows[self.rows]
        tokens = len(rows)
        return Mix(self.pairs[:tokens, :tokens] @ rows, self.plain[:tokens] @ rows, self.count)


def counted(shares: F32) -> F32:
    """Of the shares [heads, queries, keys] those that are counted in."""
    found: F32 = shares[:, EVERY - 1 :: EVERY]
    return found
