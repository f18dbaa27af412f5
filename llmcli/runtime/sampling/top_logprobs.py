"""The likeliest tokens of a row of logits."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

MAX_TOP_LOGPROBS = 100  # maximum alternatives per token
SHORTLIST_COLUMNS = (
    4096  # logits per line of a table whose column maxima fit into the nearest CPU cache
)


class TokenLogprob(NamedTuple):
    """A likely token of a row, and its log-softmax over the whole vocabulary."""

    token: int
    logprob: float


class TokenScore(NamedTuple):
    """The log-softmax of the token that follows a row in a text, and the likeliest tokens of that
    row.
    """

    logprob: float
    top: tuple[TokenLogprob, ...]


def top_logprobs(
    logits: NDArray[np.float32], count: int, log_sum: float
) -> tuple[TokenLogprob, ...]:
    """Return the `count` likeliest tokens; among equals the lowest id first. Impossible tokens are
    left out.

    Shapes: logits `[n_vocab]`. `log_sum`: log of the sum of their exponentials.
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
    """All values of the columns that contain the likeliest logits.

    The row is laid out SHORTLIST_COLUMNS logits to a line; `values` are line by line, that is in
    the order of their ids. `threshold`: at least as many values as requested reach it.
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

    Each logit is read once: a value that reaches the threshold is in a column whose maximum reaches
    it, and only those columns are read again. Columns are used because their maxima are one
    vectorized reduction. After a forward pass code and data are out of the CPU caches, and each
    further numpy function costs microseconds, so there are few.

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
    if n_last:  # the last line is shorter
        values = np.concatenate(
            [values, logits[lines * across + columns[: columns.searchsorted(n_last)]]]
        )
    return Shortlist(columns, values, least)


def column_maxima(logits: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the maximum of each column of logits laid out SHORTLIST_COLUMNS to a line; NaN if the
    column contains one.

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

    It is the `count`-th largest of the maxima of 8 · `count` pieces, which is several times faster
    than finding the exact value.

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
