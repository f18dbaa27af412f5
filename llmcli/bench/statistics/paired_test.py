"""A statistical test of which of two programs, side A or side B, is faster on a machine that is not
quiet. It takes pairs of short measurements: one of A and one of B, in random order.

If both sides are equally fast, exchanging the two measurements of a pair only changes the sign of
the pair's log ratio. Because the order is random, every pattern of signs is equally likely,
whatever else the machine does. Therefore slow drift, short bursts and extreme values make the
result less precise, but not wrong. The estimate is the median of all pairwise means (Hodges and
Lehmann 1963). The interval contains the ratios that Wilcoxon's signed-rank test does not reject.

A test that is repeated until it succeeds finds differences that do not exist. Therefore there are
only a few interim analyses, at fixed fractions of the time. Each of them may use a fixed share of
the total error probability (repeated confidence intervals: Jennison and Turnbull 1989, with
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

# For each interim analysis: its time as a fraction of the total time, and its share of the error
# probability. The last analysis gets the largest share.
INTERIM_ANALYSES = ((1 / 8, 0.1), (1 / 4, 0.15), (1 / 2, 0.25), (1.0, 0.5))
# With more values, consecutive values are averaged first, because sorting all pairwise means would
# take too long.
MAX_SORTED_VALUES = 1500
MAX_EXACT_PAIRS = 300  # up to this number of values, the signed-rank distribution is exact
# if the ratio of a side's 90th to its 10th percentile is higher, the machine was busy
NOISY_RATIO = 1.3


@dataclass(frozen=True, slots=True)
class Design:
    """The duration and the required precision of a comparison.

    The comparison ends after `seconds`. It ends earlier if half the width of the interval is at
    most `precision` (0.01 is 1 %) or at most a fifth of the measured difference. It takes at least
    `min_pairs` pairs, and at least as many as an interval needs. `confidence` applies to all
    interim analyses together. `allowance` is added to both ends of the interval, because the
    positions of the two contexts in memory cause a difference that more pairs do not remove.
    """

    seconds: float = 8.0
    precision: float = 0.01
    confidence: float = 0.99
    min_pairs: int = 12
    allowance: float = 0.002


@dataclass(frozen=True, slots=True)
class Comparison:
    """The speed of side B relative to side A. `ratio`: B / A. `low`, `high`: its confidence
    interval; 0 and infinity if there are too few pairs.

    `a`, `b`: the measured rates of A and B; `a[i]` and `b[i]` are a pair. `settled`: False if the
    time ended before the interval was as narrow as required.
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
        """Whether A and B differ significantly: the interval does not include 1."""
        return not self.low <= 1 <= self.high

    @property
    def resolution(self) -> float:
        """Half the width of the interval as a relative difference; 0.04 is 4 %. A smaller
        difference would probably not be found. Infinity if there are too few pairs.
        """
        return math.sqrt(self.high / self.low) - 1 if self.low else math.inf

    @property
    def is_noisy(self) -> bool:
        """Whether the rates of A or of B vary so much that other programs must have used the
        machine.
        """
        return any(decile_ratio(rates) > NOISY_RATIO for rates in (self.a, self.b))

    def describe(self, a: str = "A", b: str = "B") -> str:
        """Return the result of the comparison as one sentence. `a`, `b`: the names of the sides."""
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
        smallest = f"{fold - 1:.1%}".replace("%", " %") if fold < 2 else f"{fold:.1f}-fold"
        undetected = f"differences below {smallest} are not detectable"
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
    `b` makes one measurement of that side and returns a rate. A higher rate is faster.

    A call should take much less than a tenth of the time, include no warm-up, and do the same work
    on both sides. `tick` is called after each pair. `coin` decides the order within a pair.
    Exceptions of a call are not caught.
    """
    coin = coin or random.Random()
    rates: tuple[list[float], list[float]] = ([], [])
    min_pairs = max(
        design.min_pairs,
        math.ceil(1 - math.log2((1 - design.confidence) * INTERIM_ANALYSES[-1][1])),
    )
    remaining_analyses, began = list(INTERIM_ANALYSES[:-1]), clock()
    while True:
        for index in (0, 1) if coin.random() < 0.5 else (1, 0):
            rates[index].append((a, b)[index]())
        tick()
        count, elapsed = len(rates[0]), (clock() - began) / design.seconds
        is_last = elapsed >= 1 and count >= min_pairs
        due_shares = [share for at, share in remaining_analyses if elapsed >= at]
        if not (is_last or due_shares):
            continue
        # an analysis that is skipped uses none of the error probability
        remaining_analyses = remaining_analyses[len(due_shares) :]
        share = INTERIM_ANALYSES[-1][1] if is_last else due_shares[-1]
        result = estimate_ratio(*rates, design, share, last=is_last)
        if result is not None:
            return result


def estimate_ratio(
    a: Sequence[float], b: Sequence[float], design: Design, share: float = 1.0, *, last: bool = True
) -> Comparison | None:
    """Return the comparison of the pairs measured so far. If `last` is False and the interval is
    still too wide, return None.

    `a`, `b`: rates of the two sides; `a[i]` and `b[i]` are a pair. `share`: the fraction of the
    error probability that this analysis may use; 1 if the number of pairs was fixed in advance.
    """
    logs = np.log(np.asarray(b, float)) - np.log(np.asarray(a, float))
    middle, low, high = signed_rank_interval(logs, (1 - design.confidence) * share)
    low, high = low - design.allowance, high + design.allowance
    settled = (high - low) / 2 <= max(design.precision, abs(middle) / 5)
    if not (settled or last):
        return None
    ratio, low_ratio, high_ratio = (math.exp(value) for value in (middle, low, high))
    return Comparison(ratio, low_ratio, high_ratio, design.confidence, tuple(a), tuple(b), settled)


def signed_rank_interval(
    values: Sequence[float] | NDArray[np.float64], error: float
) -> tuple[float, float, float]:
    """Return the Hodges-Lehmann estimate of the median of `values`, and the low and the high end of
    its interval. The interval misses the median with a probability of at most `error`.

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
    n_cut = _count_excluded_ranks(count, error / 2)
    middle = float(np.median(means))
    return (
        (middle, float(means[n_cut - 1]), float(means[-n_cut]))
        if n_cut
        else (middle, -math.inf, math.inf)
    )


def decile_ratio(rates: Sequence[float]) -> float:
    """Return the ratio of the 90th percentile of the rates to the 10th percentile; 1 if there is
    only one rate.
    """
    low, high = decile_rates(rates)
    return high / low


def decile_rates(rates: Sequence[float]) -> tuple[float, float]:
    """Return the 10th and the 90th percentile of the rates."""
    low, high = np.quantile(rates, (0.1, 0.9))
    return float(low), float(high)


@lru_cache(maxsize=64)
def _count_excluded_ranks(count: int, tail: float) -> int:
    """Return how many of the smallest values of the signed-rank statistic of `count` values
    together have a probability of at most `tail`.
    """
    if count <= MAX_EXACT_PAIRS:
        return int(
            np.searchsorted(np.cumsum(_signed_rank_probabilities(count)), tail, side="right")
        )
    mean, deviation = count * (count + 1) / 4, math.sqrt(count * (count + 1) * (2 * count + 1) / 24)
    return max(0, math.floor(mean + NormalDist().inv_cdf(tail) * deviation - 0.5))


def _signed_rank_probabilities(count: int) -> NDArray[np.float64]:
    """Return the distribution of the signed-rank statistic: the probability of each sum of a random
    subset of the numbers 1 to `count`. Shape: `[count * (count + 1) / 2 + 1]`.
    """
    probabilities = np.zeros(count * (count + 1) // 2 + 1)
    probabilities[0] = 1
    for rank in range(1, count + 1):
        end = rank * (rank + 1) // 2 + 1
        extended = probabilities[:end].copy()
        extended[rank:] += probabilities[: end - rank]
        probabilities[:end] = extended / 2
    return probabilities
