"""The search for the largest load: on servers that are a formula."""

import random
from collections.abc import Callable
from itertools import pairwise

import pytest

from llmcli.bench.load import saturation, search


def found(levels: list[float], start: int, holds: Callable[[float], bool]) -> tuple[float | None, int]:
    looking, count = search.largest(levels, start), 1
    level = next(looking)
    while True:
        try:
            level = looking.send(holds(level))
        except StopIteration as end:
            return end.value, count
        count += 1


LEVELS = search.users(200)


@pytest.mark.parametrize("start", [0, 7, len(LEVELS) - 1])
@pytest.mark.parametrize("edge", [0.5, 1, 2, 3, 7, 8, 30, 77, 150, 199, 200, 1e9])
def test_the_largest_level_that_holds_is_found_from_anywhere(edge: float, start: int) -> None:
    level, count = found(LEVELS, start, lambda level: level <= edge)
    assert level == max((one for one in LEVELS if one <= edge), default=None)
    assert count <= 20


def test_repeats_at_a_noisy_edge_agree_within_one_step() -> None:
    rng = random.Random(5)
    levels = search.rates()

    def holds(level: float) -> bool:
        """Near 3 a second it is a matter of luck: the edge of each measurement is off by 3 % (one sigma)."""
        return level <= 3 * rng.gauss(1, 0.03)

    for _ in range(30):
        three = [found(levels, search.nearest(levels, 0.4), holds) for _ in range(3)]
        places = [levels.index(level) for level, _ in three if level is not None]
        assert max(places) - min(places) <= 1
        assert max(count for _, count in three) < 30


def test_levels_are_one_grid_with_steps_of_a_tenth_or_one() -> None:
    assert search.users(20) == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 14, 16, 18, 20]
    rates = search.rates()
    assert all(1.05 < after / before < 1.15 for before, after in pairwise(rates))
    assert rates[search.nearest(rates, 2.0)] <= 2.0 < rates[search.nearest(rates, 2.0) + 1]


def queue(rate: float, count: int, seed: int, service: float = 1.0) -> tuple[list[float], list[float], list[float]]:
    """A server that takes `service` seconds for each request, one at a time: due, waiting before it, its time."""
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
    overloaded = sum(saturation.growing(*queue(1.5, 100, seed)) for seed in range(40))
    loaded = sum(saturation.growing(*queue(0.6, 100, seed)) for seed in range(40))
    assert overloaded >= 38
    assert loaded <= 2
    assert not saturation.growing(*queue(1.5, saturation.LEAST - 1, 1))
    assert not saturation.growing([1.0] * 50, [1.0] * 50, [1.0] * 50)
