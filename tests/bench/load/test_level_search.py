"""The search for the largest load, on servers whose latency is a formula."""

import math
import random
from collections.abc import Callable
from itertools import pairwise

import pytest

from llmcli.bench.load import level_search, saturation
from llmcli.bench.load.threshold_fit import Observation


def run_search(
    levels: list[float], start: int, excess: Callable[[float], float]
) -> tuple[level_search.LoadEstimate, list[Observation]]:
    """Return the estimate and the measurements of a search. `excess` is the server: the excess of
    each level (see `Observation`).
    """
    observations: list[Observation] = []
    while (index := level_search.choose_next_level(levels, start, observations)) is not None:
        observations.append(Observation(index, excess(levels[index])))
    return level_search.estimate_edge(levels, observations), observations


LEVELS = level_search.user_levels(200)


@pytest.mark.parametrize("start", [0, 7, len(LEVELS) - 1])
@pytest.mark.parametrize("edge", [0.5, 1.1, 2.1, 3.5, 7.3, 8.9, 30.5, 77, 150, 195, 1e9])
@pytest.mark.parametrize("steepness", [0.7, 20])
def test_the_largest_level_that_holds_is_found_from_any_start(
    edge: float, start: int, steepness: float
) -> None:
    estimate, observations = run_search(
        LEVELS, start, lambda level: steepness * math.log(level / edge)
    )
    assert estimate.level_index == max(
        (at for at, level in enumerate(LEVELS) if level <= edge), default=-1
    )
    assert estimate.steps == 1
    assert len(observations) <= 24


class NoisyServer:
    """A server whose latency grows with the number of users, with noise. Some measurements include
    a pause.

    `power`: exponent with which the latency grows. `noise`: standard deviation of the logarithm of
    a measurement.
    """

    def __init__(
        self, edge: float, power: float, noise: float, pauses: float, rng: random.Random
    ) -> None:
        self.edge, self.power, self.noise, self.pauses, self.rng = edge, power, noise, pauses, rng

    def __call__(self, level: float) -> float:
        pause = self.rng.expovariate(2) if self.rng.random() < self.pauses else 0.0
        return self.power * math.log(level / self.edge) + self.rng.gauss(0, self.noise) + pause


NOISY_SERVERS = [
    (20.3, 0.7, 0.03, 0.0), (20.3, 0.7, 0.06, 0.05), (20.3, 1.0, 0.10, 0.05), (6.4, 0.7, 0.10, 0.05),
    (60.0, 1.0, 0.06, 0.05), (22.0, 2.5, 0.10, 0.05),
]  # fmt: skip
SEARCHES = 40  # triples of searches for each server


def test_three_searches_agree_within_one_step() -> None:
    """Three searches agree in at least 95 % of the cases, and in 90 % on each server. The 90 %
    interval contains the true limit in at least 90 %.
    """
    rng, agreed, covered, counts = random.Random(7), list[int](), 0, list[int]()
    for server in NOISY_SERVERS:
        truth = level_search.find_fractional_index(LEVELS, math.log(server[0]))
        agreed.append(0)
        for _ in range(SEARCHES):
            searches = [run_search(LEVELS, 0, NoisyServer(*server, rng)) for _ in range(3)]
            indices = [estimate.level_index for estimate, _ in searches]
            agreed[-1] += max(indices) - min(indices) <= 1
            covered += sum(estimate.low <= truth <= estimate.high for estimate, _ in searches)
            counts += [len(observations) for _, observations in searches]
    assert min(agreed) >= 0.9 * SEARCHES
    assert sum(agreed) >= 0.95 * SEARCHES * len(NOISY_SERVERS)
    assert covered >= 0.9 * len(counts)
    assert max(counts) <= level_search.MAX_MEASUREMENTS


def test_on_a_noisy_server_searches_agree_within_the_steps_they_state() -> None:
    rng, wide, agreed = random.Random(3), 0, 0
    levels = level_search.rate_levels()
    for _ in range(SEARCHES):
        estimates = [
            run_search(levels, 50, NoisyServer(3.0, 0.6, 0.25, 0.0, rng))[0] for _ in range(3)
        ]
        indices, steps = (
            [estimate.level_index for estimate in estimates],
            max(estimate.steps for estimate in estimates),
        )
        wide += steps > 1
        agreed += max(indices) - min(indices) <= steps
    assert wide >= 0.95 * SEARCHES
    assert agreed >= 0.95 * SEARCHES


def test_one_outlier_changes_little_but_repeated_measurements_count() -> None:
    observations = [
        Observation(at, 0.1 * (at - 10.5)) for at in (4, 8, 12, 10, 11, 10, 11, 9, 12, 10)
    ]
    assert level_search.estimate_edge(LEVELS, observations).level_index == 10
    assert level_search.estimate_edge(
        LEVELS, [*observations, Observation(10, math.inf)]
    ).level_index in (
        9,
        10,
    )
    assert (
        level_search.estimate_edge(
            LEVELS, [*observations, *(Observation(10, 0.4) for _ in range(6))]
        ).level_index
        < 10
    )


def test_a_search_with_few_measurements_returns_a_wide_interval() -> None:
    levels, observations = LEVELS, list[Observation]()
    while (
        index := level_search.choose_next_level(levels, 0, observations, max_measurements=6)
    ) is not None:
        observations.append(Observation(index, math.log(levels[index] / 21)))
    assert len(observations) == 6
    estimate = level_search.estimate_edge(levels, observations)  # 1, 2, 4, 8, 16 hold, 32 does not
    assert (levels[estimate.level_index], estimate.low, estimate.high) == (
        16,
        level_search.nearest_index(levels, 16),
        level_search.nearest_index(levels, 32),
    )
    assert estimate.steps == estimate.high - estimate.low


def test_neighboring_levels_differ_by_a_tenth_or_by_one() -> None:
    assert level_search.user_levels(20) == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 14, 16, 18, 20]
    rates = level_search.rate_levels()
    assert all(1.05 < after / before < 1.15 for before, after in pairwise(rates))
    assert (
        rates[level_search.nearest_index(rates, 2.0)]
        <= 2.0
        < rates[level_search.nearest_index(rates, 2.0) + 1]
    )


def simulate_queue(
    rate: float, count: int, seed: int, service: float = 1.0
) -> tuple[list[float], list[float], list[float]]:
    """Simulate a server that takes `service` seconds per request, one at a time. Return for each
    request the time when it is due, the number of waiting requests before it, and its latency.
    """
    rng = random.Random(seed)
    due, free_at, ends = 0.0, 0.0, list[float]()
    times, waiting, ttft = [], [], []
    for _ in range(count):
        due += rng.expovariate(rate)
        waiting.append(float(sum(end > due for end in ends)))
        free_at = max(free_at, due) + service
        ends.append(free_at)
        times.append(due)
        ttft.append(free_at - due)
    return times, waiting, ttft


def test_overload_is_distinguished_from_a_steady_queue() -> None:
    overloaded = sum(
        saturation.is_falling_behind(*simulate_queue(1.5, 100, seed)) for seed in range(40)
    )
    loaded = sum(
        saturation.is_falling_behind(*simulate_queue(0.6, 100, seed)) for seed in range(40)
    )
    assert overloaded >= 38
    assert loaded <= 2
    assert not saturation.is_falling_behind(*simulate_queue(1.5, saturation.MIN_REQUESTS - 1, 1))
    assert not saturation.is_falling_behind([1.0] * 50, [1.0] * 50, [1.0] * 50)
