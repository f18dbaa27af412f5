"""The search for the largest load at which a server keeps its latency limits: which level to
measure next, and the estimate from all measurements.

A level is a number of parallel users, or a request rate. A level "holds" if the server keeps the
limits under this load. Levels come from a fixed grid, so that the results of two searches can be
compared: they agree if they are at most one step of the grid apart.

First, the level is doubled or halved until one measured level holds and another one does not.
Bisection then narrows these two down to neighbors. Finally, the levels around the limit are
measured repeatedly, until the confidence interval of the limit is one step wide or the maximum
number of measurements is reached. The estimate uses the measured distance of each measurement from
the limits, which says more than whether the level holds.
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
    """The estimate of the largest level that holds.

    `level_index`: index of this level in the grid; -1 if no level holds. `low`, `high`: 90 %
    confidence interval of the limit, as fractional indices of the grid. `steps`: the largest
    distance, in steps of the grid, at which another search still agrees with this one.
    """

    level_index: int
    low: float
    high: float
    steps: int


def user_levels(max_users: int = 4096) -> list[float]:
    """Return the grid of numbers of parallel users, from 1 to `max_users`."""
    levels = [1]
    while levels[-1] < max_users:
        levels.append(max(levels[-1] + 1, round(levels[-1] * 1.125)))
    return [float(min(level, max_users)) for level in levels]


def rate_levels(min_rate: float = 0.01, max_rate: float = 10_000.0) -> list[float]:
    """Return the grid of request rates in requests per second, from `min_rate` to about
    `max_rate`.
    """
    levels = [min_rate]
    while levels[-1] < max_rate:
        levels.append(levels[-1] * RATE_STEP)
    return [float(f"{level:.3g}") for level in levels]


def nearest_index(levels: Sequence[float], target: float) -> int:
    """Return the index of the highest level that is at most `target`; 0 if there is none."""
    return max((at for at, level in enumerate(levels) if level <= target), default=0)


def level_at(levels: Sequence[float], fractional_index: float) -> float:
    """Return the level at a fractional index of the grid. Between two levels, the value is
    interpolated geometrically.
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
    """Return the index of the level to measure next; None if the search is finished. `start`: the
    index of the first level to measure.
    """
    if not observations:
        return start
    if len(observations) >= max_measurements:
        return None
    fit = fit_monotone(observations)
    below, above = find_bracket(fit)
    if below is None:
        return _next_lower_level(levels, observations)
    if above is None:
        return _next_higher_level(levels, observations)
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
    """Return the estimate of the largest level that holds, from all measurements."""
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


def _next_lower_level(levels: Sequence[float], observations: Sequence[Observation]) -> int | None:
    """Return the index of the next level to measure if none of the measured levels holds: the level
    of half the load. At the lowest level, return its index until it is measured MIN_LEVEL_REPEATS
    times, then None to end the search.
    """
    lowest = min(measurement.level_index for measurement in observations)
    if lowest:
        return min(lowest - 1, nearest_index(levels, levels[lowest] / 2))
    return 0 if _counts(observations)[0] < MIN_LEVEL_REPEATS else None


def _next_higher_level(levels: Sequence[float], observations: Sequence[Observation]) -> int | None:
    """Return the index of the next level to measure if all measured levels hold: the level of twice
    the load; None at the end of the grid. If a level was measured repeatedly, the limit is near;
    then return the next level of the grid.
    """
    highest, counts = (
        max(measurement.level_index for measurement in observations),
        _counts(observations),
    )
    if highest == len(levels) - 1:
        return None
    doubled = nearest_index(levels, 2 * levels[highest])
    return highest + 1 if len(observations) > len(counts) else max(highest + 1, doubled)


def _counts(observations: Sequence[Observation]) -> dict[int, int]:
    counts: dict[int, int] = {}
    for measurement in observations:
        counts[measurement.level_index] = counts.get(measurement.level_index, 0) + 1
    return counts
