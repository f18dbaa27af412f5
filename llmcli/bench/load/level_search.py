"""The search for the largest load: which level to measure next, and the estimate from all
measurements.

A level is a number of users or a request rate. A level "holds" if the server keeps the latency
limits at it. Levels come from a fixed grid, so that the results of two searches are comparable:
they agree if they are at most one step of the grid apart.

First, the level is doubled or halved until one level holds and another does not. Bisection then
finds two neighboring levels like this. Finally, the levels around the limit are measured repeatedly
until the interval of the limit is one step wide or the maximum number of measurements is reached.
No single measurement decides. The estimate uses how far each one is from the limit, which tells
more than whether it is above or below.
"""

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from llmcli.bench.load.threshold_fit import (
    MAX_EXCESS,
    MIN_REPEATS,
    Observation,
    certain_bracket,
    find_bracket,
    fit_crossing,
    fit_monotone,
)

# Ratio of neighboring request rates. Neighboring numbers of users differ by one or by an eighth,
# whichever is more.
RATE_STEP = 1.1
MAX_MEASUREMENTS = 30  # maximum number of measurements in a search
MIN_MEASUREMENTS = 8  # minimum number of measurements before a search may end
MIN_LEVEL_REPEATS = 3  # measurements of the lowest level before the search gives up
MAX_STEP_WIDTH = 1.2  # an interval of the limit up to this many steps wide counts as one step


@dataclass(frozen=True, slots=True)
class LoadEstimate:
    """The estimate of the largest level at which the server keeps the latency limits.

    `level_index`: index of that level in the grid, -1 if no level holds. `low`, `high`: 90 %
    confidence interval of the limit, as fractional indices. `steps`: two searches agree if their
    levels are at most this many steps apart.
    """

    level_index: int
    low: float
    high: float
    steps: int


def user_levels(most: int = 4096) -> list[float]:
    """Return the grid of numbers of users, from 1 to `most`."""
    levels = [1]
    while levels[-1] < most:
        levels.append(max(levels[-1] + 1, round(levels[-1] * 1.125)))
    return [float(min(level, most)) for level in levels]


def rate_levels(least: float = 0.01, most: float = 10_000.0) -> list[float]:
    """Return the grid of request rates in requests per second, from `least` to about `most`."""
    levels = [least]
    while levels[-1] < most:
        levels.append(levels[-1] * RATE_STEP)
    return [float(f"{level:.3g}") for level in levels]


def nearest_index(levels: Sequence[float], target: float) -> int:
    """Return the index of the highest level that is at most `target`; 0 if there is none."""
    return max((at for at, level in enumerate(levels) if level <= target), default=0)


def level_at(levels: Sequence[float], fractional_index: float) -> float:
    """Return the level at a fractional index: between two levels of the grid, interpolated
    geometrically.
    """
    clamped = min(max(fractional_index, 0.0), len(levels) - 1.0)
    index = min(int(clamped), len(levels) - 2)
    return float(levels[index] * (levels[index + 1] / levels[index]) ** (clamped - index))


def find_fractional_index(levels: Sequence[float], logarithm: float) -> float:
    """Return the fractional index of the level whose natural logarithm is `logarithm`. Levels
    outside the grid are extrapolated.
    """
    index = min(max(bisect_right(levels, math.exp(min(logarithm, 700.0))) - 1, 0), len(levels) - 2)
    low, high = math.log(levels[index]), math.log(levels[index + 1])
    return index + (logarithm - low) / (high - low)


def choose_next_level(
    levels: Sequence[float],
    start: int,
    observations: Sequence[Observation],
    max_measurements: int = MAX_MEASUREMENTS,
) -> int | None:
    """Return the index of the level to measure next; None: end the search. `start` is the index of
    the first level.
    """
    if not observations:
        return start
    if len(observations) >= max_measurements:
        return None
    fit = fit_monotone(observations)
    below, above = find_bracket(fit)
    if below is None:
        return _lower(levels, observations)
    if above is None:
        return _higher(levels, observations)
    if above - below > 1:
        return (below + above) // 2
    estimate, counts = estimate_edge(levels, observations), _counts(observations)
    uncertain = [index for index in (below, above) if counts[index] < MIN_REPEATS]
    # The line fit contradicts the monotone fit. The curve may jump here, so measure again.
    if estimate.level_index != below and uncertain:
        return uncertain[0]
    pair = [
        index
        for index in (estimate.level_index, estimate.level_index + 1)
        if 0 <= index < len(levels)
    ]
    missing = [index for index in pair if index not in counts]
    if (
        len(observations) >= min(MIN_MEASUREMENTS, max_measurements)
        and estimate.high - estimate.low <= MAX_STEP_WIDTH
        and not missing
    ):
        return None
    # The neighbors of this pair help to estimate the slope, unless they are far from the limit.
    neighbors = [
        index
        for index in (estimate.level_index - 1, estimate.level_index + 2)
        if index in range(len(levels)) and abs(fit.get(index, 0.0)) < MAX_EXCESS
    ]
    edge = (estimate.low + estimate.high) / 2
    return min(missing or [*pair, *neighbors], key=lambda at: (counts.get(at, 0), abs(at - edge)))


def estimate_edge(levels: Sequence[float], observations: Sequence[Observation]) -> LoadEstimate:
    """Return the estimate of the largest level that keeps the limits, from all measurements."""
    below, above = find_bracket(fit_monotone(observations))
    if below is None:
        return LoadEstimate(-1, -1.0, float(above or 0), 1)
    if above is None:
        return LoadEstimate(below, float(below), float(len(levels)), 1)
    if above - below > 1:
        return LoadEstimate(below, float(below), float(above), above - below)
    fitted, counts = (
        fit_crossing(observations, [math.log(level) for level in levels], below, above),
        _counts(observations),
    )
    certain_low, certain_high = certain_bracket(observations)
    min_index, max_index = (
        (min(counts) if certain_low is None else certain_low),
        (max(counts) if certain_high is None else certain_high),
    )
    at, low, high = (
        find_fractional_index(levels, fitted.log_load + sign * fitted.half_width)
        for sign in (0, -1, 1)
    )
    low, high = (
        max(low, -1.0 if certain_low is None else certain_low),
        min(high, len(levels) if certain_high is None else certain_high),
    )
    return LoadEstimate(
        min(max(math.floor(at), min_index), max_index - 1),
        low,
        high,
        max(1, math.ceil(high - low - MAX_STEP_WIDTH + 1)),
    )


def _lower(levels: Sequence[float], seen: Sequence[Observation]) -> int | None:
    """Return the next index to measure if no measured level holds: the level of half the load. The
    lowest level is measured MIN_LEVEL_REPEATS times; then None ends the search.
    """
    lowest = min(measurement.level_index for measurement in seen)
    if lowest:
        return min(lowest - 1, nearest_index(levels, levels[lowest] / 2))
    return 0 if _counts(seen)[0] < MIN_LEVEL_REPEATS else None


def _higher(levels: Sequence[float], seen: Sequence[Observation]) -> int | None:
    """Return the next index to measure if every measured level holds: the level of twice the load,
    or None at the end of the grid. If a level was measured repeatedly, the limit is near, so return
    the next level instead.
    """
    highest, counts = max(measurement.level_index for measurement in seen), _counts(seen)
    if highest == len(levels) - 1:
        return None
    doubled = nearest_index(levels, 2 * levels[highest])
    return highest + 1 if len(seen) > len(counts) else max(highest + 1, doubled)


def _counts(seen: Sequence[Observation]) -> dict[int, int]:
    counts: dict[int, int] = {}
    for measurement in seen:
        counts[measurement.level_index] = counts.get(measurement.level_index, 0) + 1
    return counts
