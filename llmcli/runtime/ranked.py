"""The likeliest of a row of logits."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

MOST = 100  # alternatives that anybody looks at
COLUMNS = 4096  # of logits laid out in rows: their largest stay in the nearest cache


class Ranked(NamedTuple):
    """A token that a row made likely, and its log-softmax over the whole vocabulary."""

    token: int
    logprob: float


class Scored(NamedTuple):
    """What a row says of the token that stands behind it in a text: its log-softmax, and the
    likeliest there.
    """

    logprob: float
    top: tuple[Ranked, ...]


def top(logits: NDArray[np.float32], count: int, log_sum: float) -> tuple[Ranked, ...]:
    """The `count` likeliest tokens of logits [n_vocab], of equals the lowest id first; impossible
    ones are left out.
    """
    ids = likeliest(logits, count)
    ids = ids[logits[ids] >= np.finfo(np.float32).min]
    values = logits[ids]
    best = np.lexsort((ids, -values))[:count]
    return tuple(
        Ranked(token, value - log_sum)
        for token, value in zip(ids[best].tolist(), values[best].tolist(), strict=True)
    )


def likeliest(logits: NDArray[np.float32], count: int) -> NDArray[np.int64]:
    """The ids of the `count` likeliest tokens and not many more, in ascending order; all where
    there are no more.
    """
    if len(logits) < 4 * COLUMNS or count > COLUMNS // 8:
        return np.flatnonzero(logits >= floor(logits, count))
    found = shortlist(logits, count)
    (good,) = (found.values >= found.least).nonzero()
    lines, places = np.divmod(good, len(found.columns))
    ids: NDArray[np.int64] = lines * COLUMNS + found.columns[places]
    return ids


class Shortlist(NamedTuple):
    """The columns of a row of logits, laid out COLUMNS to a line, in which the likeliest stand: all
    of them, line by line, that is in the order of their ids. `least`: what at least as many as were
    wanted reach.
    """

    columns: NDArray[np.int64]
    values: NDArray[np.float32]
    least: float

    def token(self, index: int) -> int:
        """The id of a value."""
        line, place = divmod(index, len(self.columns))
        return line * COLUMNS + int(self.columns[place])


def shortlist(logits: NDArray[np.float32], count: int) -> Shortlist:
    """Where the `count` likeliest of logits [n_vocab] stand.

    One look at every logit: whatever reaches the floor lies in a column whose largest does; only
    those are read again. Columns, because the largest of many are found at once: 262,144 logits
    take 51 µs, in pieces of 512 that lie together 93 (two-core Xeon, 2026-11, in a loop of their
    own). Behind a forward pass nothing is in the caches, the code least of all: each other function
    of numpy's costs 5 to 15 µs then, which is why there are few, and methods.
    """
    across = min(COLUMNS, len(logits))
    lines, left = divmod(len(logits), across)
    table = logits[: lines * across].reshape(lines, across)
    largest = peaks(logits)
    ordered = largest.copy()
    place = max(0, across - count)
    ordered.partition(place)
    least = ordered[place]
    (columns,) = (largest >= least).nonzero()
    values = table.take(columns, 1).ravel()
    if left:  # the last line is shorter
        values = np.concatenate(
            [values, logits[lines * across + columns[: columns.searchsorted(left)]]]
        )
    return Shortlist(columns, values, least)


def peaks(logits: NDArray[np.float32]) -> NDArray[np.float32]:
    """The largest of each column of logits [n_vocab] laid out COLUMNS to a line, NaN where one of
    them is.
    """
    across = min(COLUMNS, len(logits))
    lines, left = divmod(len(logits), across)
    largest: NDArray[np.float32] = np.maximum.reduce(
        logits[: lines * across].reshape(lines, across), 0
    )
    if left:
        np.maximum(largest[:left], logits[-left:], out=largest[:left])
    return largest


def floor(logits: NDArray[np.float32], count: int) -> float:
    """A value that at least `count` logits reach and not many more: the largest of as many pieces
    tell one.

    Finding the very value among 49,152 takes 55 µs, this 14 (np.partition, 8 of them).
    """
    pieces = 8 * count
    if len(logits) > 2 * pieces:
        logits = logits[: len(logits) // pieces * pieces].reshape(pieces, -1).max(axis=1)
    return (
        float(np.partition(logits, len(logits) - count)[len(logits) - count])
        if len(logits) > count
        else -np.inf
    )
