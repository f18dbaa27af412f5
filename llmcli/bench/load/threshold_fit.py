"""Where an increasing curve crosses zero, estimated from noisy measurements.

Two fits use all measurements. The monotone fit (isotonic regression by pooling adjacent violators)
gives the two levels between which the crossing lies; single outliers do not mislead it, but it
cannot be finer than the levels. A line through the nearby measurements gives the position between
the levels and its uncertainty. Outliers count less (Huber's weights), and with few measurements the
slope stays near the typical slope of servers.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import fmean

CLIP = math.log(2)  # excesses beyond twice the limit, or below half of it, are clipped to these
NEAR = 4  # the curve is assumed to be straight within this many levels of the crossing
# prior exponent of the load with which times grow on servers, known as if from one pair of
# measurements
POWER = 0.85
# distance in log load of the prior's pair of measurements, each with an error of NOISE_OF_SLOPE
# (one sigma)
UNIT = 0.12
NOISE_OF_SLOPE = 0.1
FLATTEST = 0.17
# prior noise of one measurement (one sigma), known as if from NOISES measurements
NOISE, NOISES = 0.08, 6
WEIGHED = 1.5  # sigmas within which a measurement has full weight
# half of the interval in standard errors, so that it contains the true value in nine of ten cases
# (tests/bench/load)
SURE = 2.2
# REPEATS measurements of one level, CERTAIN standard errors away from zero, override the fits
CERTAIN, REPEATS = 3.5, 3
ROUNDS = 8  # iterations of the weights


@dataclass(frozen=True, slots=True)
class Seen:
    """One measurement: the index of its level, and the logarithm of the measured value relative to
    the limit (0: exactly at the limit).
    """

    at: int
    excess: float

    @property
    def clipped(self) -> float:
        """The excess, clipped to ±MAX_EXCESS."""
        return max(-CLIP, min(CLIP, self.excess))


@dataclass(frozen=True, slots=True)
class Crossing:
    """The position of the crossing and half of its interval, as logarithms of a load."""

    at: float
    error: float


def monotone(seen: Sequence[Seen]) -> dict[int, float]:
    """Return the fitted value of each measured level in order; the values never decrease."""
    blocks: list[tuple[list[int], list[float]]] = []
    for at, group in groupby(_ordered(seen), lambda measurement: measurement.at):
        blocks.append(([at], [measurement.clipped for measurement in group]))
        while len(blocks) > 1 and fmean(blocks[-2][1]) >= fmean(blocks[-1][1]):
            levels, values = blocks.pop()
            blocks[-1][0].extend(levels)
            blocks[-1][1].extend(values)
    return {at: fmean(values) for levels, values in blocks for at in levels}


def bracket(fit: dict[int, float]) -> tuple[int | None, int | None]:
    """Return the last measured level that is not above zero, and the first one that is."""
    return max((at for at, value in fit.items() if value <= 0), default=None), min(
        (at for at, value in fit.items() if value > 0), default=None
    )


def certain(seen: Sequence[Seen]) -> tuple[int | None, int | None]:
    """Return the last level that is certainly not above zero by its own measurements, and the first
    one that certainly is.

    A curve may jump, for example where a server has no slot for one more user. The line is wrong
    there, but these levels are right.
    """
    by_level = {
        at: [measurement.clipped for measurement in group]
        for at, group in groupby(_ordered(seen), lambda measurement: measurement.at)
    }
    means = {at: fmean(values) for at, values in by_level.items()}
    squares = sum((value - means[at]) ** 2 for at, values in by_level.items() for value in values)
    sigma = math.sqrt((NOISES * NOISE**2 + squares) / (NOISES + len(seen) - len(by_level)))
    deviations = {
        at: means[at] * math.sqrt(len(values)) / sigma
        for at, values in by_level.items()
        if len(values) >= REPEATS
    }
    above = min((at for at, value in deviations.items() if value > CERTAIN), default=None)
    below = [
        at for at, value in deviations.items() if value < -CERTAIN and (above is None or at < above)
    ]
    return max(below, default=None), above


def _ordered(seen: Sequence[Seen]) -> list[Seen]:
    return sorted(seen, key=lambda measurement: measurement.at)


def crossing(seen: Sequence[Seen], x: Sequence[float], below: int, above: int) -> Crossing:
    """Return the crossing of the line through the measurements near the bracket. `x`: the logarithm
    of each level.
    """
    near = [
        (x[measurement.at], measurement.clipped)
        for measurement in seen
        if below - NEAR <= measurement.at <= above + NEAR
        and (abs(measurement.excess) < CLIP or measurement.at in (below, above))
    ]
    weights, sigma = [1.0] * len(near), NOISE
    for _ in range(ROUNDS):
        total = sum(weights)
        middle = sum(weight * at for weight, (at, _) in zip(weights, near, strict=True)) / total
        mean = sum(weight * value for weight, (_, value) in zip(weights, near, strict=True)) / total
        prior = min(1.0, (sigma / NOISE_OF_SLOPE) ** 2) * UNIT**2
        spread, along = prior, POWER * prior
        for weight, (at, value) in zip(weights, near, strict=True):
            spread += weight * (at - middle) ** 2
            along += weight * (at - middle) * (value - mean)
        slope = max(FLATTEST, along / spread)
        residuals = [value - mean - slope * (at - middle) for at, value in near]
        squares = sum(
            weight * residual * residual
            for weight, residual in zip(weights, residuals, strict=True)
        )
        sigma = math.sqrt((NOISES * NOISE**2 + squares) / (NOISES + max(0.0, total - 2)))
        weights = [
            min(1.0, WEIGHED * sigma / abs(residual)) if residual else 1.0 for residual in residuals
        ]
    at = middle - mean / slope
    # the slope is uncertain, too: use its lower bound
    flattest_slope = max(FLATTEST, slope - sigma / math.sqrt(spread))
    return Crossing(
        at, SURE * sigma / flattest_slope * math.sqrt(1 / total + (at - middle) ** 2 / spread)
    )
