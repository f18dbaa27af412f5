"""The largest load that keeps a promise: which level to measure next, and what all measurements
say.

It measures nothing. Loads are levels of a fixed grid, so that two searches can be compared: they
agree within one step where their levels are neighbours. Doubling finds a level that holds and one
that does not, bisection neighbours, and then the levels around the edge are measured again and
again until its interval is one step, or MOST measurements are made. Every measurement stays in the
account (crossing.py): none of them decides alone.

2026-11-22: a majority of three measurements at the edge, each taken for yes or no, let three
searches agree within one step 53 to 81 times of 100 where a measurement is off by 6 to 10 % (one
sigma): how far off the promise a measurement was is worth many times what its yes or no is.
"""

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from llmcli.bench.load.threshold_fit import (
    CLIP,
    REPEATS,
    Seen,
    bracket,
    certain,
    crossing,
    monotone,
)

STEP = 1.1  # between rates; between numbers of users one, or an eighth where that is more
MOST = 30  # measurements of a search
LEAST = 8  # of them before it may end
NONE = 3  # of the least level before nothing is said to hold
WIDE = 1.2  # steps of an interval that is taken for one


@dataclass(frozen=True, slots=True)
class Found:
    """The place of the largest level that holds, -1: none; the interval of the edge in places (90
    %).

    `steps` is what the noise allowed: two searches agree where they are no more than that apart.
    """

    at: int
    low: float
    high: float
    steps: int


def users(most: int = 4096) -> list[float]:
    """Numbers of users that are tried."""
    found = [1]
    while found[-1] < most:
        found.append(max(found[-1] + 1, round(found[-1] * 1.125)))
    return [float(min(one, most)) for one in found]


def rates(least: float = 0.01, most: float = 10_000.0) -> list[float]:
    """Requests a second that are tried."""
    found = [least]
    while found[-1] < most:
        found.append(found[-1] * STEP)
    return [float(f"{one:.3g}") for one in found]


def nearest(levels: Sequence[float], wanted: float) -> int:
    """Where in the grid a level is, or the next one below it."""
    return max((at for at, level in enumerate(levels) if level <= wanted), default=0)


def between(levels: Sequence[float], place: float) -> float:
    """The level at a place that may lie between two of the grid."""
    inside = min(max(place, 0.0), len(levels) - 1.0)
    at = min(int(inside), len(levels) - 2)
    return float(levels[at] * (levels[at + 1] / levels[at]) ** (inside - at))


def place(levels: Sequence[float], logarithm: float) -> float:
    """The same the other way round, of a level's logarithm; beyond the grid its last steps go on."""
    at = min(max(bisect_right(levels, math.exp(min(logarithm, 700.0))) - 1, 0), len(levels) - 2)
    low, high = math.log(levels[at]), math.log(levels[at + 1])
    return at + (logarithm - low) / (high - low)


def following(
    levels: Sequence[float], start: int, seen: Sequence[Seen], most: int = MOST
) -> int | None:
    """The place in the grid to measure next; None: enough is known."""
    if not seen:
        return start
    if len(seen) >= most:
        return None
    fit = monotone(seen)
    below, above = bracket(fit)
    if below is None:
        return _lower(levels, seen)
    if above is None:
        return _higher(levels, seen)
    if above - below > 1:
        return (below + above) // 2
    told, count = found(levels, seen), _counts(seen)
    doubted = [at for at in (below, above) if count[at] < REPEATS]
    if (
        told.at != below and doubted
    ):  # the line and what was measured last differ: a jump is no line
        return doubted[0]
    pair = [at for at in (told.at, told.at + 1) if 0 <= at < len(levels)]
    missing = [at for at in pair if at not in count]
    if len(seen) >= min(LEAST, most) and told.high - told.low <= WIDE and not missing:
        return None
    # Levels beside the two tell the slope, but not those that are far from the promise.
    beside = [
        at
        for at in (told.at - 1, told.at + 2)
        if at in range(len(levels)) and abs(fit.get(at, 0.0)) < CLIP
    ]
    edge = (told.low + told.high) / 2
    return min(missing or [*pair, *beside], key=lambda at: (count.get(at, 0), abs(at - edge)))


def found(levels: Sequence[float], seen: Sequence[Seen]) -> Found:
    """What the measurements say."""
    below, above = bracket(monotone(seen))
    if below is None:
        return Found(-1, -1.0, float(above or 0), 1)
    if above is None:
        return Found(below, float(below), float(len(levels)), 1)
    if above - below > 1:
        return Found(below, float(below), float(above), above - below)
    edge, tried = crossing(seen, [math.log(level) for level in levels], below, above), _counts(seen)
    held, broken = certain(seen)
    least, most = (min(tried) if held is None else held), (max(tried) if broken is None else broken)
    at, low, high = (place(levels, edge.at + part * edge.error) for part in (0, -1, 1))
    low, high = (
        max(low, -1.0 if held is None else held),
        min(high, len(levels) if broken is None else broken),
    )
    return Found(
        min(max(math.floor(at), least), most - 1),
        low,
        high,
        max(1, math.ceil(high - low - WIDE + 1)),
    )


def _lower(levels: Sequence[float], seen: Sequence[Seen]) -> int | None:
    """Nothing held so far: half the load; the least of all some more times."""
    lowest = min(one.at for one in seen)
    if lowest:
        return min(lowest - 1, nearest(levels, levels[lowest] / 2))
    return 0 if _counts(seen)[0] < NONE else None


def _higher(levels: Sequence[float], seen: Sequence[Seen]) -> int | None:
    """Everything held so far: twice the load, or the next level where one that seemed too much
    turned out not to be.
    """
    highest, count = max(one.at for one in seen), _counts(seen)
    if highest == len(levels) - 1:
        return None
    doubled = nearest(levels, 2 * levels[highest])
    return highest + 1 if len(seen) > len(count) else max(highest + 1, doubled)


def _counts(seen: Sequence[Seen]) -> dict[int, int]:
    counts: dict[int, int] = {}
    for one in seen:
        counts[one.at] = counts.get(one.at, 0) + 1
    return counts
