"""Which of two sides is faster on a machine that is not quiet: pairs of short measurements in
random order.

A coin decides for each pair which side is measured first. If the sides are equal, swapping them
only changes the sign of a pair's log ratio, so every pattern of signs is equally likely, whatever
else the machine does. Drift over many pairs, bursts and heavy tails therefore cost precision but
not correctness. The estimate is the Hodges-Lehmann estimate (1963), the median of all pairwise
means; the interval comes from inverting Wilcoxon's signed-rank test.

Testing repeatedly and stopping at will would find differences that do not exist. There are few
interim analyses, at fixed shares of the time, and each spends a part of the total error probability
(repeated confidence intervals: Jennison and Turnbull 1989, with Bonferroni's bound).
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

# Interim analyses: share of the time, and share of the error probability that the analysis may
# spend. The last one gets most of it.
INTERIM_ANALYSES = ((1 / 8, 0.1), (1 / 4, 0.15), (1 / 2, 0.25), (1.0, 0.5))
# above this number of pairs, means of consecutive pairs are used, since all pairwise means are
# sorted
MAX_SORTED_VALUES = 1500
MAX_EXACT_PAIRS = (
    300  # up to this number of pairs, the signed-rank distribution is computed exactly
)
# ratio of the fast to the slow tenth of a side's rates above which the machine was busy
NOISY_RATIO = 1.3


@dataclass(frozen=True, slots=True)
class Design:
    """The duration and the required precision of a comparison.

    The comparison ends after `seconds`, or earlier if half of the interval is at most `precision`
    (0.01: 1 %) or a fifth of the difference. At least `least` pairs are measured, and as many as
    the interval needs. `confidence` holds for all interim analyses together. `allowance` is added
    to both ends of the interval: the placement of two contexts in memory makes a difference that
    more pairs do not remove.
    """

    seconds: float = 8.0
    precision: float = 0.01
    confidence: float = 0.99
    min_pairs: int = 12
    allowance: float = 0.002


@dataclass(frozen=True, slots=True)
class Comparison:
    """The speed of B relative to A: `ratio` with its interval. `low` 0 and `high` inf: too few
    pairs for an interval.

    `a` and `b`: the measured rates, in pairs. `settled` False: the time ended before the interval
    was as narrow as requested.
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
        """Whether the interval excludes equal speeds."""
        return not self.low <= 1 <= self.high

    @property
    def resolution(self) -> float:
        """Half the width of the interval as a relative difference: 0.04 is 4 %. Smaller differences
        would mostly go unnoticed. It may be inf.
        """
        return math.sqrt(self.high / self.low) - 1 if self.low else math.inf

    @property
    def is_noisy(self) -> bool:
        """Whether the rates of one side vary so much that the machine must have been busy."""
        return any(decile_ratio(rates) > NOISY_RATIO for rates in (self.a, self.b))

    def describe(self, a: str = "A", b: str = "B") -> str:
        """Return the verdict as one line."""
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
    """Measure pairs of both sides until the comparison is precise enough. A call of a side returns
    a rate; higher is faster.

    A call should take much less than a tenth of the time, include no warm-up, and do the same work
    for both sides. `tick` is called after each pair. Exceptions of a side propagate.
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
        early = early[len(due) :]  # a skipped analysis spends nothing
        share = INTERIM_ANALYSES[-1][1] if last else due[-1]
        result = estimate_ratio(*rates, design, share, last=last)
        if result is not None:
            return result


def estimate_ratio(
    a: Sequence[float], b: Sequence[float], design: Design, share: float = 1.0, *, last: bool = True
) -> Comparison | None:
    """Return the comparison of the pairs measured so far. Returns None if this is not the `last`
    analysis and the interval is still too wide.

    `share`: the share of the error probability that this analysis may spend; 1 for a number of
    pairs that was fixed in advance.
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
    """Return the median of `values`, and an interval that misses it with a probability of at most
    `error`.

    The values must be independent and symmetric around their median. The interval is (-inf, inf) if
    there are too few values for `error`.

    Source: Hodges and Lehmann's estimate, Wilcoxon's signed-rank interval.
    """
    array = np.asarray(values, float)
    group_size = -(-len(array) // MAX_SORTED_VALUES)
    if group_size > 1:  # means of consecutive values are symmetric and independent, too
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
    """Return the ratio of a side's fast tenth to its slow tenth; 1 for a single measurement."""
    low, high = decile_rates(rates)
    return high / low


def decile_rates(rates: Sequence[float]) -> tuple[float, float]:
    """Return the rate at which the slow tenth ends, and the one at which the fast tenth begins."""
    low, high = np.quantile(rates, (0.1, 0.9))
    return float(low), float(high)


@lru_cache(maxsize=64)
def _cut(count: int, tail: float) -> int:
    """Return how many of the smallest signed-rank sums have a total probability of at most
    `tail`.
    """
    if count <= MAX_EXACT_PAIRS:
        return int(np.searchsorted(np.cumsum(_ranks(count)), tail, side="right"))
    mean, deviation = count * (count + 1) / 4, math.sqrt(count * (count + 1) * (2 * count + 1) / 24)
    return max(0, math.floor(mean + NormalDist().inv_cdf(tail) * deviation - 0.5))


def _ranks(count: int) -> NDArray[np.float64]:
    """Return the probability of each sum of a random subset of 1…count. Shape: `[count * (count +
    1) / 2 + 1]`.
    """
    probabilities = np.zeros(count * (count + 1) // 2 + 1)
    probabilities[0] = 1
    for rank in range(1, count + 1):
        end = rank * (rank + 1) // 2 + 1
        extended = probabilities[:end].copy()
        extended[rank:] += probabilities[: end - rank]
        probabilities[:end] = extended / 2
    return probabilities
