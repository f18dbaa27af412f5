"""Finds the likeliest tokens of a row of logits."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

MAX_TOP_LOGPROBS = 100  # maximum number of likeliest tokens that may be requested per token
SHORTLIST_COLUMNS = (
    4096  # logits per line of a table whose column maxima fit into the nearest CPU cache
)


class TokenLogprob(NamedTuple):
    """A likely token of a row, and its log-softmax over the whole vocabulary."""

    token: int
    logprob: float


class TokenScore(NamedTuple):
    """The log-softmax of the token that follows in the text, and the likeliest tokens at its
    position.
    """

    logprob: float
    top: tuple[TokenLogprob, ...]


def top_logprobs(
    logits: NDArray[np.float32], count: int, log_sum: float
) -> tuple[TokenLogprob, ...]:
    """Return the `count` likeliest tokens, likeliest first; among equals the lowest id comes first.
    Impossible tokens are left out.

    Shapes: logits `[n_vocab]`. `log_sum`: logarithm of the sum of exp(logits).
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
    """Return the ids of the `count` likeliest tokens, and possibly a few more, in ascending order.

    Shapes: logits `[n_vocab]`.
    """
    if len(logits) < 4 * SHORTLIST_COLUMNS or count > SHORTLIST_COLUMNS // 8:
        return np.flatnonzero(logits >= top_threshold(logits, count))
    candidates = find_shortlist(logits, count)
    (reached,) = (candidates.values >= candidates.threshold).nonzero()
    lines, columns = np.divmod(reached, len(candidates.columns))
    ids: NDArray[np.int64] = lines * SHORTLIST_COLUMNS + candidates.columns[columns]
    return ids


class Shortlist(NamedTuple):
    """All values of those columns that contain the likeliest logits.

    The row is laid out as lines of SHORTLIST_COLUMNS logits. `values` are ordered line by line,
    that is, by token id. `threshold`: a value that at least the requested number of logits reach.
    """

    columns: NDArray[np.int64]
    values: NDArray[np.float32]
    threshold: float

    def token_id(self, index: int) -> int:
        """Return the token id of the value at `index`."""
        line, column = divmod(index, len(self.columns))
        return line * SHORTLIST_COLUMNS + int(self.columns[column])


def find_shortlist(logits: NDArray[np.float32], count: int) -> Shortlist:
    """Return the columns that contain the `count` likeliest logits.

    Each logit is read once to find the maximum of each column. A logit that reaches the threshold
    is in a column whose maximum reaches it, so only those columns are read again. The maxima of all
    columns are one vectorized reduction. After a forward pass code and data are out of the CPU
    caches, and each further numpy function costs microseconds, so few functions are called.

    Shapes: logits `[n_vocab]`.
    """
    across = min(SHORTLIST_COLUMNS, len(logits))
    lines, n_last = divmod(len(logits), across)
    table = logits[: lines * across].reshape(lines, across)
    largest = column_maxima(logits)
    ordered = largest.copy()
    rank = max(0, across - count)
    ordered.partition(rank)
    least = ordered[rank]
    (columns,) = (largest >= least).nonzero()
    values = table.take(columns, 1).ravel()
    if n_last:  # the last line is shorter than the others
        values = np.concatenate(
            [values, logits[lines * across + columns[: columns.searchsorted(n_last)]]]
        )
    return Shortlist(columns, values, least)


def column_maxima(logits: NDArray[np.float32]) -> NDArray[np.float32]:
    """Lay out the logits as lines of SHORTLIST_COLUMNS, and return the maximum of each column; NaN
    if the column contains a NaN.

    Shapes: logits `[n_vocab]`, result `[columns]`.
    """
    across = min(SHORTLIST_COLUMNS, len(logits))
    lines, n_last = divmod(len(logits), across)
    largest: NDArray[np.float32] = np.maximum.reduce(
        logits[: lines * across].reshape(lines, across), 0
    )
    if n_last:
        np.maximum(largest[:n_last], logits[-n_last:], out=largest[:n_last])
    return largest


def top_threshold(logits: NDArray[np.float32], count: int) -> float:
    """Return a value that at least `count` logits reach, and not many more.

    It is the `count`-th largest of the maxima of 8 · `count` pieces of the row, which takes a
    fraction of the time of finding the `count`-th largest logit.

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
