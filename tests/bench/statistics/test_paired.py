"""The statistics of a comparison, on simulated noise that is stronger than that of a real
machine.
"""

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest

from llmcli.bench.statistics.paired_test import (
    Comparison,
    Design,
    compare_pairs,
    decile_ratio,
    estimate_ratio,
    signed_rank_interval,
)

DESIGN = Design(seconds=4, allowance=0)
RUNS = 150


class Machine:
    """A clock and simulated measurements on a machine that is shared with other programs.

    The speed drifts (an AR(1) process in its logarithm, and a square wave of another program).
    Single measurements have a Student t distribution with 3 degrees of freedom, and one in forty
    takes twice as long.
    """

    def __init__(self, seed: int, noise: float = 0.04) -> None:
        self.random, self.noise = np.random.default_rng(seed), noise
        self.now = self.random.uniform(0, 5)
        self.drift = 0.0

    def side(self, speed: float = 1.0) -> Callable[[], float]:
        def measure() -> float:
            self.drift = 0.98 * self.drift + 0.03 * self.random.standard_normal()
            slow = (
                self.drift
                + self.noise * self.random.standard_t(3)
                + 0.3 * (math.sin(self.now * 2) > 0.3)
            )
            seconds = 0.01 * math.exp(slow) * (2 if self.random.random() < 1 / 40 else 1) / speed
            self.now += seconds
            return 1 / seconds

        return measure

    def compare(self, speed: float, design: Design = DESIGN) -> Comparison:
        coin = random.Random(int(self.random.integers(2**32)))
        return compare_pairs(
            self.side(), self.side(speed), design, clock=lambda: self.now, coin=coin
        )


def simulate_comparisons(speed: float, noise: float = 0.04) -> Iterator[Comparison]:
    return (Machine(seed, noise).compare(speed) for seed in range(RUNS))


def test_equal_sides_rarely_differ():
    """The confidence of 99 % covers all interim analyses, so one or two of 150 comparisons may err.
    More than four err with a probability of about 2 %.
    """
    assert sum(comparison.differs for comparison in simulate_comparisons(1.0)) <= 4


@pytest.mark.parametrize("speed", [0.8, 1.03])
def test_the_interval_contains_the_true_ratio(speed: float):
    comparisons = list(simulate_comparisons(speed))
    assert sum(comparison.low <= speed <= comparison.high for comparison in comparisons) >= RUNS - 4
    assert np.median([comparison.ratio for comparison in comparisons]) == pytest.approx(
        speed, rel=0.004
    )


def test_a_difference_of_five_percent_is_found():
    comparisons = list(simulate_comparisons(1 / 1.05))
    assert (
        sum(comparison.differs and comparison.ratio < 1 for comparison in comparisons)
        >= 0.97 * RUNS
    )


def test_a_clear_difference_ends_early():
    assert len(Machine(1, 0.001).compare(2.0).a) < len(Machine(1, 0.3).compare(1.0).a) / 3


def test_an_interim_analysis_has_a_wider_interval():
    """The same pairs have a wider interval in one of several analyses than in a single analysis."""
    pairs = np.random.default_rng(3).normal(size=(2, 60)) / 10
    single, interim = (estimate_ratio(*np.exp(pairs), DESIGN, share) for share in (1.0, 0.1))
    assert single and interim
    assert interim.low < single.low <= single.ratio == interim.ratio <= single.high < interim.high


def test_slow_measurements_reach_the_minimum_number_of_pairs():
    """If one measurement takes longer than the whole time, the minimum number of pairs is still
    measured.
    """
    now = [0.0]

    def side(speed: float) -> Callable[[], float]:
        def measure() -> float:
            now[0] += 60 / speed
            return speed

        return measure

    comparison = compare_pairs(
        side(1.0), side(1.5), DESIGN, clock=lambda: now[0], coin=random.Random(1)
    )
    assert len(comparison.a) == DESIGN.min_pairs
    assert comparison.differs and comparison.ratio == pytest.approx(1.5)
    stricter = replace(DESIGN, confidence=1 - 1e-6)
    assert compare_pairs(
        side(1.0), side(1.5), stricter, clock=lambda: now[0], coin=random.Random(1)
    ).differs


def test_the_order_within_pairs_is_random():
    order: list[str] = []
    clock = iter(range(10**6))
    compare_pairs(
        lambda: order.append("a") or 1.0,
        lambda: order.append("b") or 1.0,
        Design(seconds=400, precision=0),
        clock=lambda: next(clock),
        coin=random.Random(5),
    )
    pairs = ["".join(order[at : at + 2]) for at in range(0, len(order), 2)]
    assert set(pairs) == {"ab", "ba"}
    assert 0.4 < pairs.count("ab") / len(pairs) < 0.6


def test_the_interval_matches_published_data():
    """Depression scores (Hollander, Wolfe and Chicken, Nonparametric Statistical Methods, table
    3.1), with the estimate and the 96.1 % interval of examples 3.3 and 3.4.
    """
    before = [1.83, 0.50, 1.62, 2.48, 1.68, 1.88, 1.55, 3.06, 1.30]
    after = [0.878, 0.647, 0.598, 2.05, 1.06, 1.29, 1.06, 3.14, 1.29]
    middle, low, high = signed_rank_interval(np.subtract(after, before), 20 / 512)
    assert (middle, low, high) == pytest.approx((-0.46, -0.786, -0.010))


def test_the_exact_and_the_normal_interval_have_the_same_width():
    """The method changes at 300 values."""
    values = np.random.default_rng(7).normal(size=302)
    widths = []
    for count in (300, 301, 302):
        _, low, high = signed_rank_interval(values[:count], 0.01)
        widths.append(high - low)
    assert max(widths) / min(widths) < 1.03


def test_averaging_consecutive_values_keeps_the_precision():
    """Ten times as many values give an interval of about a third of the width."""
    values = 0.3 + np.random.default_rng(11).normal(size=15_007)
    (_, low, high), (middle, lowest, highest) = (
        signed_rank_interval(values[:1500], 0.01),
        signed_rank_interval(values, 0.01),
    )
    assert lowest < 0.3 < highest and middle == pytest.approx(0.3, abs=0.03)
    assert (highest - lowest) / (high - low) == pytest.approx(0.316, rel=0.1)


def test_too_few_pairs_have_an_infinite_interval():
    comparison = estimate_ratio([1.0, 1.1, 1.2], [2.0, 2.1, 2.2], DESIGN)
    assert comparison and not comparison.differs
    assert (comparison.low, comparison.high, comparison.resolution) == (0, math.inf, math.inf)
    assert comparison.describe().startswith("too few measurements")


def test_the_description_of_a_comparison():
    pairs = (1.0,) * 20
    assert (
        Comparison(1.07, 1.05, 1.09, 0.99, pairs, pairs).describe()
        == "B is 1.070x as fast as A (1.050-1.090)"
    )
    assert (
        Comparison(0.5, 0.45, 0.55, 0.99, pairs, pairs).describe("x", "y")
        == "y is 0.50x as fast as x (0.45-0.55)"
    )
    assert Comparison(1.01, 0.97, 1.05, 0.99, pairs, pairs).describe() == (
        "no significant difference: ratio 1.01 (0.97-1.05); "
        "differences below 4.0 % are not detectable"
    )


def test_one_noisy_side_makes_the_comparison_noisy():
    steady, restless = (100.0, 101.0, 99.0, 100.5), (100.0, 200.0, 97.0, 180.0)
    assert not Comparison(1, 0.9, 1.1, 0.99, steady, steady).is_noisy
    assert Comparison(1, 0.9, 1.1, 0.99, steady, restless).is_noisy
    assert decile_ratio((5.0,)) == 1
