"""The search for the largest load, on servers given by a formula."""

import math
import random
from collections.abc import Callable
from itertools import pairwise

import pytest

from llmcli.bench.load import level_search, saturation
from llmcli.bench.load.threshold_fit import Observation


def searched(
    levels: list[float], start: int, excess: Callable[[float], float]
) -> tuple[level_search.LoadEstimate, list[Observation]]:
    """What a search finds on a server that is a formula."""
    seen: list[Observation] = []
    while (at := level_search.choose_next_level(levels, start, seen)) is not None:
        seen.append(Observation(at, excess(levels[at])))
    return level_search.estimate_edge(levels, seen), seen


LEVELS = level_search.user_levels(200)


@pytest.mark.parametrize("start", [0, 7, len(LEVELS) - 1])
@pytest.mark.parametrize("edge", [0.5, 1.1, 2.1, 3.5, 7.3, 8.9, 30.5, 77, 150, 195, 1e9])
@pytest.mark.parametrize("steepness", [0.7, 20])
def test_the_largest_level_that_holds_is_found_from_anywhere(
    edge: float, start: int, steepness: float
) -> None:
    found, seen = searched(LEVELS, start, lambda level: steepness * math.log(level / edge))
    assert found.level_index == max(
        (at for at, one in enumerate(LEVELS) if one <= edge), default=-1
    )
    assert found.steps == 1
    assert len(seen) <= 24


class Shaky:
    """A server whose answers take longer with every user, and now longer, now shorter; some
    measurements meet a pause.

    `power`: how a time grows with the load. `noise`: of each measurement, one sigma of its
    logarithm.
    """

    def __init__(
        self, edge: float, power: float, noise: float, pauses: float, rng: random.Random
    ) -> None:
        self.edge, self.power, self.noise, self.pauses, self.rng = edge, power, noise, pauses, rng

    def __call__(self, level: float) -> float:
        pause = self.rng.expovariate(2) if self.rng.random() < self.pauses else 0.0
        return self.power * math.log(level / self.edge) + self.rng.gauss(0, self.noise) + pause


SHAKY = [
    (20.3, 0.7, 0.03, 0.0), (20.3, 0.7, 0.06, 0.05), (20.3, 1.0, 0.10, 0.05), (6.4, 0.7, 0.10, 0.05),
    (60.0, 1.0, 0.06, 0.05), (22.0, 2.5, 0.10, 0.05),
]  # fmt: skip
SEARCHES = 40  # of three, for each server


def test_three_searches_agree_within_one_step() -> None:
    """In 95 of 100 at least, 90 on each server; the interval holds the truth in 90 (it says 90)."""
    rng, agreed, held, counts = random.Random(7), list[int](), 0, list[int]()
    for server in SHAKY:
        truth = level_search.find_fractional_index(LEVELS, math.log(server[0]))
        agreed.append(0)
        for _ in range(SEARCHES):
            three = [searched(LEVELS, 0, Shaky(*server, rng)) for _ in range(3)]
            places = [found.level_index for found, _ in three]
            agreed[-1] += max(places) - min(places) <= 1
            held += sum(found.low <= truth <= found.high for found, _ in three)
            counts += [len(seen) for _, seen in three]
    assert min(agreed) >= 0.9 * SEARCHES
    assert sum(agreed) >= 0.95 * SEARCHES * len(SHAKY)
    assert held >= 0.9 * len(counts)
    assert max(counts) <= level_search.MAX_MEASUREMENTS


def test_a_server_too_shaky_for_one_step_says_so_and_keeps_to_what_it_said() -> None:
    rng, wide, agreed = random.Random(3), 0, 0
    levels = level_search.rate_levels()
    for _ in range(SEARCHES):
        three = [searched(levels, 50, Shaky(3.0, 0.6, 0.25, 0.0, rng))[0] for _ in range(3)]
        places, steps = [one.level_index for one in three], max(one.steps for one in three)
        wide += steps > 1
        agreed += max(places) - min(places) <= steps
    assert wide >= 0.95 * SEARCHES
    assert agreed >= 0.95 * SEARCHES


def test_no_measurement_decides_alone_and_none_is_forgotten() -> None:
    calm = [Observation(at, 0.1 * (at - 10.5)) for at in (4, 8, 12, 10, 11, 10, 11, 9, 12, 10)]
    assert level_search.estimate_edge(LEVELS, calm).level_index == 10
    assert level_search.estimate_edge(LEVELS, [*calm, Observation(10, math.inf)]).level_index in (
        9,
        10,
    )
    assert (
        level_search.estimate_edge(
            LEVELS, [*calm, *(Observation(10, 0.4) for _ in range(6))]
        ).level_index
        < 10
    )


def test_where_a_search_may_measure_little_it_says_what_it_knows() -> None:
    levels, seen = LEVELS, list[Observation]()
    while (at := level_search.choose_next_level(levels, 0, seen, max_measurements=6)) is not None:
        seen.append(Observation(at, math.log(levels[at] / 21)))
    assert len(seen) == 6
    found = level_search.estimate_edge(levels, seen)  # 1, 2, 4, 8, 16 hold, 32 does not
    assert (levels[found.level_index], found.low, found.high) == (
        16,
        level_search.nearest_index(levels, 16),
        level_search.nearest_index(levels, 32),
    )
    assert found.steps == found.high - found.low


def test_levels_are_one_grid_with_steps_of_a_tenth_or_one() -> None:
    assert level_search.user_levels(20) == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 14, 16, 18, 20]
    rates = level_search.rate_levels()
    assert all(1.05 < after / before < 1.15 for before, after in pairwise(rates))
    assert (
        rates[level_search.nearest_index(rates, 2.0)]
        <= 2.0
        < rates[level_search.nearest_index(rates, 2.0) + 1]
    )


def queue(
    rate: float, count: int, seed: int, service: float = 1.0
) -> tuple[list[float], list[float], list[float]]:
    """A server that takes `service` seconds for each request, one at a time: due, waiting before
    it, its time.
    """
    rng = random.Random(seed)
    at, free, ends = 0.0, 0.0, list[float]()
    times, waiting, ttft = [], [], []
    for _ in range(count):
        at += rng.expovariate(rate)
        waiting.append(float(sum(end > at for end in ends)))
        free = max(free, at) + service
        ends.append(free)
        times.append(at)
        ttft.append(free - at)
    return times, waiting, ttft


def test_an_overloaded_server_is_told_from_one_with_a_queue() -> None:
    overloaded = sum(saturation.is_falling_behind(*queue(1.5, 100, seed)) for seed in range(40))
    loaded = sum(saturation.is_falling_behind(*queue(0.6, 100, seed)) for seed in range(40))
    assert overloaded >= 38
    assert loaded <= 2
    assert not saturation.is_falling_behind(*queue(1.5, saturation.MIN_REQUESTS - 1, 1))
    assert not saturation.is_falling_behind([1.0] * 50, [1.0] * 50, [1.0] * 50)
