"""Which of two is faster, on a machine that is not quiet: pairs of short measurements in random
order.

A fair coin decides for each pair who is measured first. If the sides are alike, swapping them
changes the sign of a pair's log ratio and nothing else, so every pattern of signs is equally likely
whatever the machine does meanwhile: drift that goes on over many pairs, bursts and heavy tails cost
precision, not truth. The estimate is Hodges and Lehmann's, the median of the means of all two pairs
(1963); the interval is Wilcoxon's signed-rank test turned around.

Looking often and stopping when it pleases would find differences that are not there. There are few
looks, at fixed shares of the time, and each spends a part of the error that is allowed in all
(repeated confidence intervals: Jennison and Turnbull 1989, with Bonferroni's bound). It knows
nothing of models.
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

# Shares of the time at which is looked, and of the error that each look may spend: most of it is
# the last one's.
LOOKS = ((1 / 8, 0.1), (1 / 4, 0.15), (1 / 2, 0.25), (1.0, 0.5))
MANY = 1500  # values whose means two by two are sorted; of more, some in a row become one
EXACT = 300  # values up to which the signed-rank distribution is counted out
# a side whose fast tenth is this many times its slow tenth ran on a machine that does other things
NOISY = 1.3


@dataclass(frozen=True, slots=True)
class Design:
    """How long is measured, and how sure is sure.

    It ends after `seconds`, or before where half the interval is within `precision` (0.01: 1 %) or
    a fifth of the difference; `least` pairs are measured even if they take longer, or as many as
    can tell anything at all. `confidence` is that of the interval, over all looks together.
    `allowance` is added to both ends: where two contexts happen to lie in memory makes a difference
    too, which no number of pairs removes.
    """

    seconds: float = 8.0
    precision: float = 0.01
    confidence: float = 0.99
    least: int = 12
    allowance: float = 0.002


@dataclass(frozen=True, slots=True)
class Comparison:
    """How fast B is, in units of A: `ratio`, with its interval. `low` 0 and `high` inf: too few
    pairs to tell.

    `a` and `b` are the rates as they were measured, the pairs in order; `settled` False where the
    time was over before the interval was as narrow as wanted.
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
        """Whether the noise supports a difference."""
        return not self.low <= 1 <= self.high

    @property
    def resolution(self) -> float:
        """Half the interval: a difference smaller than this would mostly go unseen. 0.04 is 4 %;
        may be inf.
        """
        return math.sqrt(self.high / self.low) - 1 if self.low else math.inf

    @property
    def noisy(self) -> bool:
        """Whether a side alone ran at speeds so far apart that the machine must have been doing
        other things.
        """
        return any(wander(rates) > NOISY for rates in (self.a, self.b))

    def words(self, a: str = "A", b: str = "B") -> str:
        """The verdict in a line."""
        span = (
            f"{self.low:.3g}-{self.high:.3g}"
            if self.resolution >= 0.02
            else f"{self.low:.3f}-{self.high:.3f}"
        )
        ratio = f"{self.ratio:.2f}" if self.resolution >= 0.02 else f"{self.ratio:.3f}"
        if self.differs:
            return f"{b} is {ratio}x as fast as {a} ({span})"
        if math.isinf(self.resolution):
            return f"too few measurements to tell: ratio {ratio}"
        fold = 1 + self.resolution
        seen = f"{fold - 1:.1%}".replace("%", " %") if fold < 2 else f"{fold:.1f}-fold"
        unseen = f"differences below {seen} cannot be seen"
        return f"no difference this noise supports: ratio {ratio} ({span}); {unseen}"


def compare(
    a: Measure,
    b: Measure,
    design: Design = Design(),
    *,
    tick: Callable[[], None] = lambda: None,
    clock: Callable[[], float] = time.monotonic,
    coin: random.Random | None = None,
) -> Comparison:
    """Measure pairs of both sides until enough is known. Each call of a side gives a rate: higher
    is faster.

    A side should take well under a tenth of the time, warm-up is its own affair, and a pair should
    be the same piece of work. `tick` is called after each pair. What a side raises passes through.
    """
    coin = coin or random.Random()
    rates: tuple[list[float], list[float]] = ([], [])
    least = max(design.least, math.ceil(1 - math.log2((1 - design.confidence) * LOOKS[-1][1])))
    early, began = list(LOOKS[:-1]), clock()
    while True:
        for side in (0, 1) if coin.random() < 0.5 else (1, 0):
            rates[side].append((a, b)[side]())
        tick()
        count, spent = len(rates[0]), (clock() - began) / design.seconds
        last = spent >= 1 and count >= least
        due = [share for at, share in early if spent >= at]
        if not (last or due):
            continue
        early = early[len(due) :]  # a look that was slept through spends nothing
        share = LOOKS[-1][1] if last else due[-1]
        found = judge(*rates, design, share, last=last)
        if found is not None:
            return found


def judge(
    a: Sequence[float], b: Sequence[float], design: Design, share: float = 1.0, *, last: bool = True
) -> Comparison | None:
    """What these pairs say; None where it is not the `last` look and more pairs are worth it.

    `share` is the part of the error that this look may spend: all of it for a number of pairs fixed
    beforehand.
    """
    logs = np.log(np.asarray(b, float)) - np.log(np.asarray(a, float))
    middle, low, high = shift(logs, (1 - design.confidence) * share)
    low, high = low - design.allowance, high + design.allowance
    settled = (high - low) / 2 <= max(design.precision, abs(middle) / 5)
    if not (settled or last):
        return None
    ratio, least, most = (math.exp(value) for value in (middle, low, high))
    return Comparison(ratio, least, most, design.confidence, tuple(a), tuple(b), settled)


def shift(
    values: Sequence[float] | NDArray[np.float64], error: float
) -> tuple[float, float, float]:
    """The middle of `values`, and an interval that misses it with a probability of at most `error`.

    Hodges and Lehmann's estimate, and the signed-rank interval: values symmetric about their middle
    and of signs that are independent of one another are all it takes. (-inf, inf) where there are
    too few values for `error`.
    """
    given = np.asarray(values, float)
    row = -(-len(given) // MANY)
    if row > 1:  # their means are as symmetric, and as independent
        given = given[: len(given) // row * row].reshape(-1, row).mean(axis=1)
    count = len(given)
    rows, columns = np.triu_indices(count)
    means = np.sort((given[rows] + given[columns]) / 2)
    cut = _cut(count, error / 2)
    middle = float(np.median(means))
    return (
        (middle, float(means[cut - 1]), float(means[-cut]))
        if cut
        else (middle, -math.inf, math.inf)
    )


def wander(rates: Sequence[float]) -> float:
    """How many times its slow tenth a side's fast tenth is; 1 where it was only measured once."""
    low, high = tenths(rates)
    return high / low


def tenths(rates: Sequence[float]) -> tuple[float, float]:
    """Where the slow tenth ends and the fast one begins."""
    low, high = np.quantile(rates, (0.1, 0.9))
    return float(low), float(high)


@lru_cache(maxsize=64)
def _cut(count: int, tail: float) -> int:
    """How many of the smallest sums of signed ranks have together no more than `tail` of the
    probability.
    """
    if count <= EXACT:
        return int(np.searchsorted(np.cumsum(_ranks(count)), tail, side="right"))
    mean, deviation = count * (count + 1) / 4, math.sqrt(count * (count + 1) * (2 * count + 1) / 24)
    return max(0, math.floor(mean + NormalDist().inv_cdf(tail) * deviation - 0.5))


def _ranks(count: int) -> NDArray[np.float64]:
    """The probability of each sum of 1…count where each number is in it or not with the same
    chance.
    """
    chances = np.zeros(count * (count + 1) // 2 + 1)
    chances[0] = 1
    for rank in range(1, count + 1):
        end = rank * (rank + 1) // 2 + 1
        grown = chances[:end].copy()
        grown[rank:] += chances[: end - rank]
        chances[:end] = grown / 2
    return chances
