"""The measured cost of other cells: found where it exists, and 0 where noise hides it."""

import random

import pytest

from llmcli.runtime.kv_cache.attention_cost import AttentionCost, SinglePassTimes


def record_passes(
    cost: AttentionCost, cell_seconds: float, noise: float, count: int = 200, seed: int = 0
) -> None:
    """Record passes of 10 ms a row, with a cost of own and of other cells and with noise."""
    rng = random.Random(seed)
    for _ in range(count):
        own, other = rng.randrange(100, 2000), rng.choice((0, 500, 3000, 9000))
        seconds = 0.01 + own * 1e-6 + other * cell_seconds
        cost.record(own, other, seconds * rng.uniform(1, 1 + noise))


@pytest.mark.parametrize("noise", [0.0, 0.05, 0.3])
@pytest.mark.parametrize("cell_seconds", [1e-6, 3e-6, 1e-5])
def test_a_noticeable_cost_is_found_and_never_much_overestimated(
    noise: float, cell_seconds: float
) -> None:
    for seed in range(5):
        cost = AttentionCost()
        record_passes(cost, cell_seconds, noise, seed=seed)
        assert cost.is_measured
        assert 0.4 * cell_seconds <= cost.cell_seconds <= 1.2 * cell_seconds * (1 + noise / 2)


def test_noise_alone_is_hardly_ever_taken_for_a_cost() -> None:
    found = 0
    for seed in range(40):
        cost = AttentionCost()
        record_passes(cost, 0.0, 0.3, seed=seed)
        # a cost that counts would be 1 % of a row for 1,000 cells
        found += cost.cell_seconds > 1e-7
    assert found <= 2


def test_the_cost_of_own_cells_is_not_taken_for_that_of_others() -> None:
    cost = AttentionCost()
    rng = random.Random(3)
    for _ in range(100):
        own = rng.randrange(100, 5000)
        cost.record(own, 300, 0.01 + own * 1e-5)
    assert not cost.is_measured
    for _ in range(100):
        own, other = rng.randrange(100, 5000), rng.randrange(9000)
        cost.record(own, other, 0.01 + own * 1e-5)
    assert cost.is_measured
    assert cost.cell_seconds < 1e-9


def test_nothing_is_estimated_from_few_passes() -> None:
    cost = AttentionCost()
    record_passes(cost, 1e-4, 0.0, count=8)
    assert not cost.is_measured
    assert cost.cell_seconds == 0


def test_a_forgotten_machine_does_not_decide() -> None:
    cost = AttentionCost()
    record_passes(cost, 1e-5, 0.05)
    record_passes(cost, 1e-6, 0.05, count=1500)
    assert cost.cell_seconds < 2e-6


def test_the_median_of_single_passes_is_recorded() -> None:
    cost = AttentionCost()
    times = SinglePassTimes(cost)
    for other in (0, 1000, 5000) * 20:
        for position in range(10):
            interrupted = position == 3
            times.add(100 + position, 100 + position + other, 0.01 + other * 1e-6 + interrupted)
        times.flush()
        times.flush()
    assert cost.cell_seconds == pytest.approx(1e-6, rel=0.1)
