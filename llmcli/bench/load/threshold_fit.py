"""The point at which an increasing curve crosses zero, estimated from noisy measurements. In the
search for the largest load, the curve is the excess (see `Observation`) as a function of the load.

There are two fits. The monotone fit (isotonic regression by pooling adjacent violators) gives the
two levels between which the curve crosses zero. It is robust against single outliers, but does not
give a position between the two levels. A line through the measurements near the crossing gives this
position and its uncertainty. In the line fit, outliers have less weight (Huber). With few
measurements, its slope stays near the typical slope of servers.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import fmean

# excesses are clipped to ± this value, so that the ratio to the limit is between 1/2 and 2
MAX_EXCESS = math.log(2)
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
    by its limit. It is 0 if the latency equals the limit, and positive if the latency exceeds it.
    """

    level_index: int
    excess: float

    @property
    def clipped_excess(self) -> float:
        """The excess, clipped to the range from -MAX_EXCESS to MAX_EXCESS."""
        return max(-MAX_EXCESS, min(MAX_EXCESS, self.excess))


@dataclass(frozen=True, slots=True)
class Crossing:
    """The load at which the curve crosses zero. `log_load`: its natural logarithm. `half_width`:
    half the width of the confidence interval of `log_load`.
    """

    log_load: float
    half_width: float


def fit_monotone(observations: Sequence[Observation]) -> dict[int, float]:
    """Return the fitted excess of each measured level, by level index in ascending order. The
    values never decrease.
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
    """Return the highest level whose fitted excess is at most zero, and the lowest level whose
    fitted excess is above zero; None if there is no such level. `fit`: the result of
    `fit_monotone`.
    """
    return max((at for at, value in fit.items() if value <= 0), default=None), min(
        (at for at, value in fit.items() if value > 0), default=None
    )


def certain_bracket(observations: Sequence[Observation]) -> tuple[int | None, int | None]:
    """Return the highest level whose excess is certainly below zero, and the lowest level whose
    excess is certainly above zero; None if there is no such level. Each level is judged only by its
    own measurements.

    The curve may jump, for example where a server has no slot for one more user. A line fits badly
    at a jump, but the returned levels are still correct.
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


def _ordered(observations: Sequence[Observation]) -> list[Observation]:
    return sorted(observations, key=lambda measurement: measurement.level_index)


def fit_crossing(
    observations: Sequence[Observation], log_levels: Sequence[float], below: int, above: int
) -> Crossing:
    """Fit a line to the measurements near the bracket, and return where the line crosses zero.
    `log_levels`: the logarithm of each level's load. `below`, `above`: the level indices of the
    bracket.
    """
    points = [
        (log_levels[measurement.level_index], measurement.clipped_excess)
        for measurement in observations
        if below - NEAR_LEVELS <= measurement.level_index <= above + NEAR_LEVELS
        and (abs(measurement.excess) < MAX_EXCESS or measurement.level_index in (below, above))
    ]
    weights, sigma = [1.0] * len(points), PRIOR_NOISE
    for _ in range(WEIGHT_ITERATIONS):
        total = sum(weights)
        middle = (
            sum(weight * log_load for weight, (log_load, _) in zip(weights, points, strict=True))
            / total
        )
        mean = (
            sum(weight * value for weight, (_, value) in zip(weights, points, strict=True)) / total
        )
        prior = min(1.0, (sigma / NOISE_OF_SLOPE) ** 2) * PRIOR_DISTANCE**2
        variance, covariance = prior, PRIOR_SLOPE * prior
        for weight, (log_load, value) in zip(weights, points, strict=True):
            variance += weight * (log_load - middle) ** 2
            covariance += weight * (log_load - middle) * (value - mean)
        slope = max(MIN_SLOPE, covariance / variance)
        residuals = [value - mean - slope * (log_load - middle) for log_load, value in points]
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
    log_load = middle - mean / slope
    # the slope is uncertain, too: the interval uses a slope that is one standard error flatter
    flattest_slope = max(MIN_SLOPE, slope - sigma / math.sqrt(variance))
    return Crossing(
        log_load,
        INTERVAL_ERRORS
        * sigma
        / flattest_slope
        * math.sqrt(1 / total + (log_load - middle) ** 2 / variance),
    )
