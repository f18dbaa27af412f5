"""Second moments of the input of a value weight (attn_v), taken over the mixtures that attention
makes of the input rows.

For head h and query q, attention mixes the values of the tokens t to o = W_v (sum over t of a_hqt
x_t). The attention weights a_hqt are called shares here. An error of W_v matters only after this
mixture, so its moments are taken over the sums in parentheses. They are X^T B X, where the rows of
X are the input rows of one chunk, and B is the sum of A^T A over the heads' share matrices A
[queries, keys]. With the plain moments of x, GPTQ's error feedback makes attn_v worse than ggml's
search; with these moments it makes attn_v far better. Only every second query is counted, because
neighboring queries have nearly the same shares.
"""

from dataclasses import dataclass

import numpy as np

from quant.calibration.imatrix_collector import F32, F64

# Smaller shares are replaced by this value: their products would be denormal numbers, each of which
# takes a CPU about 100 cycles.
MIN_SHARE = np.float32(1e-15)
QUERY_STEP = 2  # every second query is counted
# Number of queries whose shares are multiplied at a time. Keys beyond the last one that any of
# these queries attends to are skipped.
STRIP_QUERIES = 64


@dataclass(frozen=True, slots=True)
class MixedRows:
    """The mixtures that attention makes of one chunk's input rows X. `rows` are B X, so that X^T
    `rows` is the sum of m m^T over all mixtures m. `first` is the sum of all mixtures, and `count`
    is their number.
    """

    rows: F32
    first: F64
    count: int


class ChunkMixing:
    """The attention of one layer in one chunk.

    `pair_sums` [keys, keys] is the sum of A^T A, and `share_sums` [keys] the sum of the rows of A,
    over all heads and counted queries, where A [queries, keys] are a head's shares. `count` is the
    number of mixtures: heads times counted queries. `rows` is the slice of the layer's collected
    input rows that belongs to this chunk.
    """

    def __init__(self) -> None:
        self.pair_sums, self.share_sums, self.count = np.zeros((0, 0), np.float32), np.zeros(0), 0
        self.rows = slice(0)
        self._shares: list[F32] = []  # [heads, queries, keys] of each forward pass

    @property
    def waiting_bytes(self) -> int:
        """Bytes of the stored shares that are not yet added to the sums."""
        return sum(shares.nbytes for shares in self._shares)

    def add(self, shares: F32) -> None:
        """Store the shares [heads, queries, keys] of one forward pass. They are only copied here
        and multiplied later, because llama.cpp's threads busy-wait during this call.
        """
        self._shares.append(select_queries(shares).copy())

    def multiply_waiting(self) -> None:
        """Add the stored shares to the sums, oldest first, and drop them. The sums grow as needed,
        because later forward passes of a chunk have more keys.
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
        """Return the mixtures of this chunk's rows. `rows` [tokens, columns] are the collected rows
        of all chunks, of which this chunk's are the slice `self.rows`.
        """
        self.multiply_waiting()
        rows = rows[self.rows]
        tokens = len(rows)
        return MixedRows(
            self.pair_sums[:tokens, :tokens] @ rows, self.share_sums[:tokens] @ rows, self.count
        )


def select_queries(shares: F32) -> F32:
    """Return the shares of the counted queries, every second one of shares [heads,
    queries, keys].
    """
    selected: F32 = shares[:, QUERY_STEP - 1 :: QUERY_STEP]
    return selected
