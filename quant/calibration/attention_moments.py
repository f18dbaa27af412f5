"""Second moments of the input of an attention's values, weighted as the attention mixes it: one
matrix for each chunk.

For head h and query q, attention mixes the values of the tokens t to o = W_v (sum over t of a_hqt
x_t). An error of W_v matters only after this mixture, so its moments are taken over the sums in
parentheses: X^T B X, where X are the rows that enter W_v and B is the sum of A^T A over heads. With
the plain moments of x, error feedback makes attn_v worse than ggml's search; with these it makes it
far better. Neighboring queries have nearly the same attention weights, so only every second query
is counted.
"""

from dataclasses import dataclass

import numpy as np

from quant.calibration.imatrix_collector import F32, F64

# Smaller shares are replaced by this value: their products would be denormal numbers, each of which
# takes a CPU about 100 cycles.
MIN_SHARE = np.float32(1e-15)
QUERY_STEP = 2  # every second query is counted
# number of queries whose shares are multiplied at a time, up to the last key that any of them
# attends to
STRIP_QUERIES = 64


@dataclass(frozen=True, slots=True)
class MixedRows:
    """The mixtures of a chunk's rows X: `rows` are B X, `first` is the sum of all mixtures, and
    `count` is the number of mixtures.
    """

    rows: F32
    first: F64
    count: int


class ChunkMixing:
    """The attention of one layer in one chunk: sums over heads and counted queries of A^T A
    (`pair_sums`) and of A (`share_sums`), where A [queries, keys] are a head's shares, and the
    number of mixtures. `rows` is the slice of the chunk in the rows that are collected.
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
        """Add the shares of one pass. They are only copied now, because llama.cpp busy-waits during
        this call.
        """
        self._shares.append(select_queries(shares).copy())

    def multiply_waiting(self) -> None:
        """Multiply the waiting shares in order of arrival. Later passes of a chunk have more keys."""
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
        """Return the mixtures of the chunk's rows, which are the slice `self.rows` of `rows`
        [tokens, columns].
        """
        self.multiply_waiting()
        rows = rows[self.rows]
        tokens = len(rows)
        return MixedRows(
            self.pair_sums[:tokens, :tokens] @ rows, self.share_sums[:tokens] @ rows, self.count
        )


def select_queries(shares: F32) -> F32:
    """Return the shares of the counted queries from shares [heads, queries, keys]."""
    selected: F32 = shares[:, QUERY_STEP - 1 :: QUERY_STEP]
    return selected
