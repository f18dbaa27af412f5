"""The point at which an increasing curve crosses zero, estimated from noisy measurements. For a
search, the curve is the excess (see `Observation`) over the load.

Two fits use all measurements. The monotone fit (isotonic regression by pooling adjacent violators)
gives the two levels between which the curve crosses zero. Single outliers do not mislead it, but it
says nothing about the position between the levels. A line through the nearby measurements gives
this position and its uncertainty. In the line fit, outliers count less (Huber's weights), and with
few measurements the slope stays near the typical slope of servers.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import fmean

MAX_EXCESS = math.log(
    2
)  # excesses are clipped to ± this value, which is a ratio of 2 or 1/2 to the limit
NEAR_LEVELS = 4  # the line fit uses levels up to this many steps from the crossing
# The line fit starts from a prior, a typical slope of servers: times grow with this power of the
# load. The prior has the weight of one pair of measurements.
PRIOR_SLOPE = 0.85
# That pair of measurements is this far apart in log load; each of the two has an error of
# NOISE_OF_SLOPE (one sigma).
PRIOR_DISTANCE = 0.12
NOISE_OF_SLOPE = 0.1
MIN_SLOPE = 0.17
# Noise of a measurement (one sigma) before any is known. It has the weight of PRIOR_NOISE_COUNT
# measurements.
PRIOR_NOISE, PRIOR_NOISE_COUNT = 0.08, 6
FULL_WEIGHT_SIGMAS = 1.5  # up to this many sigmas from the line, a measurement has full weight
# Half of the confidence interval in standard errors. With this value, the interval contains the
# true crossing in nine of ten cases (tests/bench/load).
INTERVAL_ERRORS = 2.2
# The mean of at least MIN_REPEATS measurements of one level overrides the fits if it is more than
# CERTAIN_ERRORS standard errors away from zero.
CERTAIN_ERRORS, MIN_REPEATS = 3.5, 3
WEIGHT_ITERATIONS = 8  # iterations of the line fit, each with new weights


@dataclass(frozen=True, slots=True)
class Observation:
    """One measurement of a level. `excess`: the natural logarithm of the measured latency divided
    by its limit, so 0 is exactly at the limit and positive values exceed it.
    """

    level_index: int
    excess: float

    @property
    def clipped_excess(self) -> float:
        """The excess, clipped to at most MAX_EXCESS and at least -MAX_EXCESS."""
        return max(-MAX_EXCESS, min(MAX_EXCESS, self.excess))


@dataclass(frozen=True, slots=True)
class Crossing:
    """The load at which the curve crosses zero. `log_load`: its natural logarithm. `half_width`:
    half of the width of its confidence interval, also as a logarithm.
    """

    log_load: float
    half_width: float


def fit_monotone(observations: Sequence[Observation]) -> dict[int, float]:
    """Return the fitted excess of each measured level, in the order of the levels. The values never
    decrease.
    """
    blocks: list[tuple[list[int], list[float]]] = []
    for at, group in groupby(_ordered(observations), lambda measurement: measurement.level_index):
        blocks.append(([at], [measurement.clipped_excess for measurement in group]))
        while len(blocks) > 1 and fmean(blocks[-2][1]) >= fmean(blocks[-1][1]):
            levels, values = blocks.pop()
            blocks[-1][0].extend(levels)
            blocks[-1][1].extend(values)
    return {at: fmean(values) for levels, values in blocks for at in levels}


def find_bracket(fit: dict[int, float]) -> tuple[int | None, int | None]:
    """Return the highest level whose fitted value is at most zero, and the lowest level whose
    fitted value is above zero; None: there is no such level.
    """
    return max((at for at, value in fit.items() if value <= 0), default=None), min(
        (at for at, value in fit.items() if value > 0), default=None
    )


def certain_bracket(observations: Sequence[Observation]) -> tuple[int | None, int | None]:
    """Return the highest level that is certainly below zero, and the lowest level that is certainly
    above zero; None: there is no such level. Each level is judged by its own measurements.

    The curve may jump, for example where a server has no slot for one more user. A line fits badly
    at a jump, but the levels returned here are right.
    """
    by_level = {
        at: [measurement.clipped_excess for measurement in group]
        for at, group in groupby(
            _ordered(observations), lambda measurement: measurement.level_index
        )
    }
    means = {at: fmean(values) for at, values in by_level.items()}
    squares = sum((value - means[at]) ** 2 for at, values in by_level.items() for value in values)
    sigma = math.sqrt(
        (PRIOR_NOISE_COUNT * PRIOR_NOISE**2 + squares)
        / (PRIOR_NOISE_COUNT + len(observations) - len(by_level))
    )
    deviations = {
        at: means[at] * math.sqrt(len(values)) / sigma
        for at, values in by_level.items()
        if len(values) >= MIN_REPEATS
    }
    above = min((at for at, value in deviations.items() if value > CERTAIN_ERRORS), default=None)
    below = [
        at
        for at, value in deviations.items()
        if value < -CERTAIN_ERRORS and (above is None or at < above)
    ]
    return max(below, default=None), above


def _ordered(seen: Sequence[Observation]) -> list[Observation]:
    return sorted(seen, key=lambda measurement: measurement.level_index)


def fit_crossing(
    observations: Sequence[Observation], log_levels: Sequence[float], below: int, above: int
) -> Crossing:
    """Fit a line to the measurements near the bracket, and return where it crosses zero.
    `log_levels`: the logarithm of each level's load. `below`, `above`: the levels of the bracket.
    """
    near = [
        (log_levels[measurement.level_index], measurement.clipped_excess)
        for measurement in observations
        if below - NEAR_LEVELS <= measurement.level_index <= above + NEAR_LEVELS
        and (abs(measurement.excess) < MAX_EXCESS or measurement.level_index in (below, above))
    ]
    weights, sigma = [1.0] * len(near), PRIOR_NOISE
    for _ in range(WEIGHT_ITERATIONS):
        total = sum(weights)
        middle = sum(weight * at for weight, (at, _) in zip(weights, near, strict=True)) / total
        mean = sum(weight * value for weight, (_, value) in zip(weights, near, strict=True)) / total
        prior = min(1.0, (sigma / NOISE_OF_SLOPE) ** 2) * PRIOR_DISTANCE**2
        spread, along = prior, PRIOR_SLOPE * prior
        for weight, (at, value) in zip(weights, near, strict=True):
            spread += weight * (at - middle) ** 2
            along += weight * (at - middle) * (value - mean)
        slope = max(MIN_SLOPE, along / spread)
        residuals = [value - mean - slope * (at - middle) for at, value in near]
        squares = sum(
            weight * residual * residual
            for weight, residual in zip(weights, residuals, strict=True)
        )
        sigma = math.sqrt(
            (PRIOR_NOISE_COUNT * PRIOR_NOISE**2 + squares)
            / (PRIOR_NOISE_COUNT + max(0.0, total - 2))
        )
        weights = [
            min(1.0, FULL_WEIGHT_SIGMAS * sigma / abs(residual)) if residual else 1.0
            for residual in residuals
        ]
    at = middle - mean / slope
    # the slope is uncertain, too: the interval uses a slope that is one standard error flatter
    flattest_slope = max(MIN_SLOPE, slope - sigma / math.sqrt(spread))
    return Crossing(
        at,
        INTERVAL_ERRORS
        * sigma
        / flattest_slope
        * math.sqrt(1 / total + (at - middle) ** 2 / spread),
    )
