"""A test of which of two sides is faster on a machine that is not quiet. It measures pairs of short
measurements, one of each side, in random order.

For each pair, chance decides which side is measured first. If both sides are equally fast,
exchanging the two only changes the sign of the pair's log ratio. Then every pattern of signs is
equally likely, whatever else the machine does. Therefore slow drift, short bursts and extreme
values make the result less precise, but not wrong. The estimate is the median of all pairwise means
(Hodges and Lehmann 1963). The interval contains the ratios that Wilcoxon's signed-rank test does
not reject.

A test that is repeated until it succeeds finds differences that do not exist. Therefore there are
only a few interim analyses, at fixed fractions of the time. Each of them may use a part of the
total error probability (repeated confidence intervals: Jennison and Turnbull 1989, with
Bonferroni's bound).
"""

import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

Measure = Callable[[], float]

# For each interim analysis: when it is made, as a fraction of the time, and its part of the error
# probability. The last analysis gets the largest part.
INTERIM_ANALYSES = ((1 / 8, 0.1), (1 / 4, 0.15), (1 / 2, 0.25), (1.0, 0.5))
# With more pairs, means of several consecutive pairs are used as values, because sorting all
# pairwise means would take too long.
MAX_SORTED_VALUES = 1500
MAX_EXACT_PAIRS = (
    300  # up to this number of values, the signed-rank distribution is computed exactly
)
# if the ratio of a side's fast tenth to its slow tenth is higher, the machine was busy
NOISY_RATIO = 1.3


@dataclass(frozen=True, slots=True)
class Design:
    """The duration and the required precision of a comparison.

    The comparison ends after `seconds`. It ends earlier if half of the interval is at most
    `precision` (0.01 is 1 %) or at most a fifth of the difference. It measures at least `min_pairs`
    pairs, and at least as many as an interval needs. `confidence` holds for all interim analyses
    together. `allowance` is added to both ends of the interval for the positions of the two
    contexts in memory. These cause a difference that more pairs do not remove.
    """

    seconds: float = 8.0
    precision: float = 0.01
    confidence: float = 0.99
    min_pairs: int = 12
    allowance: float = 0.002


@dataclass(frozen=True, slots=True)
class Comparison:
    """The speed of B relative to A. `ratio`: B / A. `low`, `high`: its confidence interval; 0 and
    infinity if there are too few pairs.

    `a`, `b`: the measured rates of each side, in pairs. `settled`: False if the time ended before
    the interval was as narrow as required.
    """

    ratio: float
    low: float
    high: float
    confidence: float
    a: tuple[float, ...]
    b: tuple[float, ...]
    settled: bool = True

    @property
    def differs(self) -> bool:
        """Whether the sides differ, because the interval does not include equal speeds."""
        return not self.low <= 1 <= self.high

    @property
    def resolution(self) -> float:
        """Half of the width of the interval as a relative difference: 0.04 is 4 %. A smaller
        difference would probably not be found. Infinity if there are too few pairs.
        """
        return math.sqrt(self.high / self.low) - 1 if self.low else math.inf

    @property
    def is_noisy(self) -> bool:
        """Whether the rates of a side vary so much that the machine must have been busy."""
        return any(decile_ratio(rates) > NOISY_RATIO for rates in (self.a, self.b))

    def describe(self, a: str = "A", b: str = "B") -> str:
        """Return the result of the comparison as one line."""
        span = (
            f"{self.low:.3g}-{self.high:.3g}"
            if self.resolution >= 0.02
            else f"{self.low:.3f}-{self.high:.3f}"
        )
        ratio = f"{self.ratio:.2f}" if self.resolution >= 0.02 else f"{self.ratio:.3f}"
        if self.differs:
            return f"{b} is {ratio}x as fast as {a} ({span})"
        if math.isinf(self.resolution):
            return f"too few measurements: ratio {ratio}"
        fold = 1 + self.resolution
        seen = f"{fold - 1:.1%}".replace("%", " %") if fold < 2 else f"{fold:.1f}-fold"
        undetected = f"differences below {seen} are not detectable"
        return f"no significant difference: ratio {ratio} ({span}); {undetected}"


def compare_pairs(
    a: Measure,
    b: Measure,
    design: Design = Design(),
    *,
    tick: Callable[[], None] = lambda: None,
    clock: Callable[[], float] = time.monotonic,
    coin: random.Random | None = None,
) -> Comparison:
    """Measure pairs until the comparison is precise enough or its time is over. Each call of `a` or
    `b` measures that side, and returns a rate; higher is faster.

    A call should take much less than a tenth of the time, include no warm-up, and do the same work
    for both sides. `tick` is called after each pair. Exceptions of a call are not caught.
    """
    coin = coin or random.Random()
    rates: tuple[list[float], list[float]] = ([], [])
    least = max(
        design.min_pairs,
        math.ceil(1 - math.log2((1 - design.confidence) * INTERIM_ANALYSES[-1][1])),
    )
    early, began = list(INTERIM_ANALYSES[:-1]), clock()
    while True:
        for index in (0, 1) if coin.random() < 0.5 else (1, 0):
            rates[index].append((a, b)[index]())
        tick()
        count, elapsed = len(rates[0]), (clock() - began) / design.seconds
        last = elapsed >= 1 and count >= least
        due = [share for at, share in early if elapsed >= at]
        if not (last or due):
            continue
        early = early[len(due) :]  # an analysis that is skipped uses none of the error probability
        share = INTERIM_ANALYSES[-1][1] if last else due[-1]
        result = estimate_ratio(*rates, design, share, last=last)
        if result is not None:
            return result


def estimate_ratio(
    a: Sequence[float], b: Sequence[float], design: Design, share: float = 1.0, *, last: bool = True
) -> Comparison | None:
    """Return the comparison from the pairs measured so far. If this is not the `last` analysis,
    return None while the interval is too wide.

    `share`: the fraction of the error probability that this analysis may use; 1 if the number of
    pairs was fixed in advance.
    """
    logs = np.log(np.asarray(b, float)) - np.log(np.asarray(a, float))
    middle, low, high = signed_rank_interval(logs, (1 - design.confidence) * share)
    low, high = low - design.allowance, high + design.allowance
    settled = (high - low) / 2 <= max(design.precision, abs(middle) / 5)
    if not (settled or last):
        return None
    ratio, least, most = (math.exp(value) for value in (middle, low, high))
    return Comparison(ratio, least, most, design.confidence, tuple(a), tuple(b), settled)


def signed_rank_interval(
    values: Sequence[float] | NDArray[np.float64], error: float
) -> tuple[float, float, float]:
    """Return the Hodges-Lehmann estimate of the median of `values`, and the interval that misses
    the median with a probability of at most `error`.

    The values must be independent, and distributed symmetrically around their median. The interval
    is (-inf, inf) if there are too few values.

    Source: Wilcoxon's signed-rank interval.
    """
    array = np.asarray(values, float)
    group_size = -(-len(array) // MAX_SORTED_VALUES)
    if group_size > 1:  # means of consecutive values are independent and symmetric, too
        array = array[: len(array) // group_size * group_size].reshape(-1, group_size).mean(axis=1)
    count = len(array)
    rows, columns = np.triu_indices(count)
    means = np.sort((array[rows] + array[columns]) / 2)
    n_cut = _cut(count, error / 2)
    middle = float(np.median(means))
    return (
        (middle, float(means[n_cut - 1]), float(means[-n_cut]))
        if n_cut
        else (middle, -math.inf, math.inf)
    )


def decile_ratio(rates: Sequence[float]) -> float:
    """Return the ratio of a side's fast tenth to its slow tenth; 1 if there is only one rate."""
    low, high = decile_rates(rates)
    return high / low


def decile_rates(rates: Sequence[float]) -> tuple[float, float]:
    """Return the rate that the slowest tenth of the rates does not exceed, and the rate that the
    fastest tenth reaches (quantiles 0.1 and 0.9).
    """
    low, high = np.quantile(rates, (0.1, 0.9))
    return float(low), float(high)


@lru_cache(maxsize=64)
def _cut(count: int, tail: float) -> int:
    """Return how many of the smallest signed-rank sums together have a probability of at most
    `tail`.
    """
    if count <= MAX_EXACT_PAIRS:
        return int(np.searchsorted(np.cumsum(_ranks(count)), tail, side="right"))
    mean, deviation = count * (count + 1) / 4, math.sqrt(count * (count + 1) * (2 * count + 1) / 24)
    return max(0, math.floor(mean + NormalDist().inv_cdf(tail) * deviation - 0.5))


def _ranks(count: int) -> NDArray[np.float64]:
    """Return the probability of each sum of a random subset of the numbers 1…count. Shape: `[count
    * (count + 1) / 2 + 1]`.
    """
    probabilities = np.zeros(count * (count + 1) // 2 + 1)
    probabilities[0] = 1
    for rank in range(1, count + 1):
        end = rank * (rank + 1) // 2 + 1
        extended = probabilities[:end].copy()
        extended[rank:] += probabilities[: end - rank]
        probabilities[:end] = extended / 2
    return probabilities
