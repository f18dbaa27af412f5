"""The order of measurements in the search for the largest load, and the estimate from all of them.

Loads are levels of a fixed grid, so that two searches are comparable: they agree within one step if
their levels are neighbors. Doubling finds a level that holds and one that does not, and bisection
finds neighbors. Then the levels around the limit are measured repeatedly until the interval is one
step wide or the maximum number of measurements is reached. Every measurement contributes to the
estimate, and none decides alone: how far a measurement is from the limit tells much more than
whether it is above or below.
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

# ratio of neighboring request rates; numbers of users differ by one, or by an eighth if that is
# more
RATE_STEP = 1.1
MAX_MEASUREMENTS = 30  # measurements of a search
MIN_MEASUREMENTS = 8  # measurements before it may end
MIN_LEVEL_REPEATS = 3  # measurements of the lowest level before the search gives up
MAX_STEP_WIDTH = 1.2  # width in steps of an interval that counts as one step


@dataclass(frozen=True, slots=True)
class LoadEstimate:
    """The estimate of the largest level that holds.

    `level_index`: its index, -1: none. `low`, `high`: the interval of the limit, as indices (90 %
    confidence). `steps`: two searches agree if they are at most this many steps apart.
    """

    level_index: int
    low: float
    high: float
    steps: int


def user_levels(most: int = 4096) -> list[float]:
    """Return the numbers of users to try."""
    levels = [1]
    while levels[-1] < most:
        levels.append(max(levels[-1] + 1, round(levels[-1] * 1.125)))
    return [float(min(level, most)) for level in levels]


def rate_levels(least: float = 0.01, most: float = 10_000.0) -> list[float]:
    """Return the request rates to try, in requests per second."""
    levels = [least]
    while levels[-1] < most:
        levels.append(levels[-1] * RATE_STEP)
    return [float(f"{level:.3g}") for level in levels]


def nearest_index(levels: Sequence[float], target: float) -> int:
    """Return the index of a level in the grid, or of the next lower one."""
    return max((at for at, level in enumerate(levels) if level <= target), default=0)


def level_at(levels: Sequence[float], fractional_index: float) -> float:
    """Return the level at a fractional index, interpolated geometrically."""
    clamped = min(max(fractional_index, 0.0), len(levels) - 1.0)
    index = min(int(clamped), len(levels) - 2)
    return float(levels[index] * (levels[index + 1] / levels[index]) ** (clamped - index))


def find_fractional_index(levels: Sequence[float], logarithm: float) -> float:
    """Return the fractional index of a level, given its logarithm; beyond the grid it is
    extrapolated.
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
    """Return the index of the level to measure next; None if the estimate is good enough."""
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
    # the line fit and the last measurement disagree: a jump is not linear
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
    # Levels next to the two help to estimate the slope unless they are far from the limit.
    neighbors = [
        index
        for index in (estimate.level_index - 1, estimate.level_index + 2)
        if index in range(len(levels)) and abs(fit.get(index, 0.0)) < MAX_EXCESS
    ]
    edge = (estimate.low + estimate.high) / 2
    return min(missing or [*pair, *neighbors], key=lambda at: (counts.get(at, 0), abs(at - edge)))


def estimate_edge(levels: Sequence[float], observations: Sequence[Observation]) -> LoadEstimate:
    """Return the estimate from all measurements."""
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
    """Return a lower level if nothing has held so far: half the load. The lowest level is repeated
    a few times.
    """
    lowest = min(measurement.level_index for measurement in seen)
    if lowest:
        return min(lowest - 1, nearest_index(levels, levels[lowest] / 2))
    return 0 if _counts(seen)[0] < MIN_LEVEL_REPEATS else None


def _higher(levels: Sequence[float], seen: Sequence[Observation]) -> int | None:
    """Return a higher level if everything has held so far: twice the load, or the next level if an
    apparently failing one turned out to hold.
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
