"""Second moments of attention's value inputs after the attention weights: one matrix for each
chunk.

Attention mixes the outputs of the values: for head h and query q, o = W_v (sum over t of a_hqt
x_t). The error of W_v matters after that mixture, so its moments are those of the sum in
parentheses: X^T B X, where B is the sum of A^T A over heads. With plain moments of x, error
feedback makes attn_v worse than ggml's search; with these it is far better. Neighboring queries
have nearly the same attention weights, so every second query is skipped.
"""

from dataclasses import dataclass

import numpy as np

from quant.calibration.imatrix_collector import F32, F64

# Smaller shares count as this: products of two would be denormal numbers, each of which takes a CPU
# about 100 cycles.
MIN_SHARE = np.float32(1e-15)
QUERY_STEP = 2  # every second query is counted
# queries whose shares are multiplied at a time; keys after the last one they attend to are zeros
STRIP_QUERIES = 64


@dataclass(frozen=True, slots=True)
class MixedRows:
    """The mixture of a chunk's rows X: `rows` are B X, `first` is the sum of all mixtures, `count`
    their number.
    """

    rows: F32
    first: F64
    count: int


class ChunkMixing:
    """The mixture of one layer's values in a chunk: sums of A^T A and of A over heads and counted
    queries, with A [queries, keys] for each head, and the number of mixtures. `rows` is the slice
    of the chunk's rows.
    """

    def __init__(self) -> None:
        self.pair_sums, self.share_sums, self.count = np.zeros((0, 0), np.float32), np.zeros(0), 0
        self.rows = slice(0)
        self._shares: list[F32] = []  # [heads, queries, keys] of each pass

    @property
    def waiting_bytes(self) -> int:
        """Bytes of shares that are not multiplied yet."""
        return sum(shares.nbytes for shares in self._shares)

    def add(self, shares: F32) -> None:
        """Add one pass. The shares are only copied, because llama.cpp busy-waits meanwhile."""
        self._shares.append(select_queries(shares).copy())

    def multiply_waiting(self) -> None:
        """Multiply the waiting shares in order of arrival. The queries of a later pass have more
        keys.
        """
        for shares in self._shares:
            heads, queries, keys = shares.shape
            if (new_keys := keys - len(self.share_sums)) > 0:
                self.pair_sums, self.share_sums = (
                    np.pad(self.pair_sums, (0, new_keys)),
                    np.pad(self.share_sums, (0, new_keys)),
                )
            for first in range(0, queries, STRIP_QUERIES):
                strip = shares[:, first : first + STRIP_QUERIES]
                end = int(np.flatnonzero(strip.max(0).max(0)).max(initial=-1)) + 1
                rows = np.maximum(strip[:, :, :end], MIN_SHARE).reshape(-1, end)
                self.pair_sums[:end, :end] += rows.T @ rows
                self.share_sums[:end] += rows.sum(0)
            self.count += heads * queries
        self._shares.clear()

    def mix_rows(self, rows: F32) -> MixedRows:
        """Mix the layer's rows [tokens, columns], of which `rows` are the chunk's."""
        self.multiply_waiting()
        rows = rows[self.rows]
        tokens = len(rows)
        return MixedRows(
            self.pair_sums[:tokens, :tokens] @ rows, self.share_sums[:tokens] @ rows, self.count
        )


def select_queries(shares: F32) -> F32:
    """Return the counted queries' shares of [heads, queries, keys]."""
    selected: F32 = shares[:, QUERY_STEP - 1 :: QUERY_STEP]
    return selected
