"""Find the likeliest tokens among the logits of one position, without a sort of the whole
vocabulary.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

MAX_TOP_LOGPROBS = 100  # maximum number of likeliest tokens that a request may ask for per token
# The logits are laid out as a table with this many columns. The maxima of the columns then fit into
# the L1 cache.
SHORTLIST_COLUMNS = 4096


class TokenLogprob(NamedTuple):
    """One of the likeliest tokens at a position, and its log-softmax over the whole vocabulary."""

    token: int
    logprob: float


class TokenScore(NamedTuple):
    """The score of a token of a given text: its log-softmax, and the likeliest tokens at its
    position.
    """

    logprob: float
    top: tuple[TokenLogprob, ...]  # likeliest first; empty if not requested


def top_logprobs(
    logits: NDArray[np.float32], count: int, log_sum: float
) -> tuple[TokenLogprob, ...]:
    """Return the `count` likeliest tokens, likeliest first. Equally likely tokens are ordered by
    id. Tokens with the logit -inf are left out.

    Shapes: logits `[n_vocab]`. `log_sum`: the logarithm of the sum of exp(logits).
    """
    ids = likeliest_ids(logits, count)
    ids = ids[logits[ids] >= np.finfo(np.float32).min]
    values = logits[ids]
    best = np.lexsort((ids, -values))[:count]
    return tuple(
        TokenLogprob(token, value - log_sum)
        for token, value in zip(ids[best].tolist(), values[best].tolist(), strict=True)
    )


def likeliest_ids(logits: NDArray[np.float32], count: int) -> NDArray[np.int64]:
    """Return the ids of the `count` likeliest tokens and possibly of a few more, in ascending order
    of the ids.

    Shapes: logits `[n_vocab]`, result `[tokens]`.
    """
    if len(logits) < 4 * SHORTLIST_COLUMNS or count > SHORTLIST_COLUMNS // 8:
        return np.flatnonzero(logits >= top_threshold(logits, count))
    candidates = find_shortlist(logits, count)
    (indices,) = (candidates.values >= candidates.threshold).nonzero()
    lines, columns = np.divmod(indices, len(candidates.columns))
    ids: NDArray[np.int64] = lines * SHORTLIST_COLUMNS + candidates.columns[columns]
    return ids


class Shortlist(NamedTuple):
    """The logits among which the likeliest ones are.

    The logits of the vocabulary are laid out as a table with SHORTLIST_COLUMNS columns, so that the
    token ids of a line are consecutive. The shortlist has all logits of some columns.
    """

    columns: NDArray[np.int64]  # indices of these columns, ascending
    values: NDArray[np.float32]  # their logits, ordered by token id
    threshold: float  # at least as many of the logits as requested are >= this

    def token_id(self, index: int) -> int:
        """Return the token id of `values[index]`."""
        line, column = divmod(index, len(self.columns))
        return line * SHORTLIST_COLUMNS + int(self.columns[column])


def find_shortlist(logits: NDArray[np.float32], count: int) -> Shortlist:
    """Return the table columns that contain the `count` likeliest logits.

    The threshold is the `count`-th largest of the column maxima. A logit above the threshold is in
    a column whose maximum is above it, so only those columns are read a second time. The maxima are
    one vectorized reduction. The function calls few numpy functions, because after a forward pass
    their code is not in the CPU caches and each call costs microseconds.

    Shapes: logits `[n_vocab]`.
    """
    width = min(SHORTLIST_COLUMNS, len(logits))
    lines, n_last = divmod(len(logits), width)
    table = logits[: lines * width].reshape(lines, width)
    maxima = column_maxima(logits)
    partitioned = maxima.copy()
    rank = max(0, width - count)
    partitioned.partition(rank)
    threshold = partitioned[rank]
    (columns,) = (maxima >= threshold).nonzero()
    values = table.take(columns, 1).ravel()
    if n_last:  # the last line is shorter than the others
        values = np.concatenate(
            [values, logits[lines * width + columns[: columns.searchsorted(n_last)]]]
        )
    return Shortlist(columns, values, threshold)


def column_maxima(logits: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the maximum of each column of the logits, which are laid out as a table with
    SHORTLIST_COLUMNS columns. The maximum is NaN if the column contains a NaN.

    Shapes: logits `[n_vocab]`, result `[columns]`.
    """
    width = min(SHORTLIST_COLUMNS, len(logits))
    lines, n_last = divmod(len(logits), width)
    maxima: NDArray[np.float32] = np.maximum.reduce(
        logits[: lines * width].reshape(lines, width), 0
    )
    if n_last:
        np.maximum(maxima[:n_last], logits[-n_last:], out=maxima[:n_last])
    return maxima


def top_threshold(logits: NDArray[np.float32], count: int) -> float:
    """Return a threshold such that at least `count` logits, and not many more, are not below it.

    The logits are divided into 8 · `count` groups. The threshold is the `count`-th largest of the
    groups' maxima, which is much faster to find than the `count`-th largest logit.

    Shapes: logits `[n_vocab]`.
    """
    pieces = 8 * count
    if len(logits) > 2 * pieces:
        logits = logits[: len(logits) // pieces * pieces].reshape(pieces, -1).max(axis=1)
    return (
        float(np.partition(logits, len(logits) - count)[len(logits) - count])
        if len(logits) > count
        else -np.inf
    )
