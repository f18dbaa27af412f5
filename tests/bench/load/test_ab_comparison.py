"""Comparison of two servers: ratios that can be checked by hand, and the coverage of the
intervals.
"""

import random

import pytest

from llmcli.bench.load import ab_comparison
from llmcli.bench.load.ab_comparison import compare_runs
from llmcli.bench.load.generator import Load, LoadRun
from llmcli.bench.load.records import LoadAnswer


def make_run(speed: float, count: int = 20) -> LoadRun:
    """Return the run of one turn in which all times are divided by `speed`. At speed 1, the first
    text arrives after 0.1 s, and then 10 tokens per second.
    """
    answers = []
    for number in range(count):
        due = number / speed
        stamps = [due + (0.1 + 0.1 * at) / speed for at in range(5)]
        answers.append(LoadAnswer(due, due, stamps[-1], stamps, [1] * 5, 10, 0, 5, measured=True))
    return LoadRun(Load("closed", 1), answers, 0.0, count / speed)


@pytest.fixture(autouse=True)
def fewer_bootstrap_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ab_comparison, "BOOTSTRAP_DRAWS", 40)


def test_ratios_are_b_divided_by_a() -> None:
    ratios = {
        ratio.name: ratio for ratio in compare_runs([make_run(1.0)] * 8, [make_run(2.0)] * 8).ratios
    }
    assert ratios["output tok/s"].ratio == pytest.approx(2)
    assert (ratios["output tok/s"].a, ratios["output tok/s"].b) == pytest.approx((5, 10))
    for name in ("ttft p50", "ttft p99", "tpot p50", "itl p99", "e2el p50"):
        assert ratios[name].ratio == pytest.approx(0.5)
        assert (ratios[name].low, ratios[name].high) == pytest.approx((0.5, 0.5))
    assert ratios["ttft p50"].a == pytest.approx(100)


def test_percentiles_of_too_few_requests_and_intervals_of_too_few_turns_are_left_out() -> None:
    ratios = {
        ratio.name: ratio for ratio in compare_runs([make_run(1.0)] * 4, [make_run(2.0)] * 4).ratios
    }
    assert "ttft p99" not in ratios  # 80 requests
    assert "itl p99" in ratios  # 320 gaps
    names = [
        ratio.name for ratio in compare_runs([make_run(1.0)] * 8, [make_run(1.0, 5)] * 8).ratios
    ]
    assert "ttft p99" not in names  # server A has 160 requests, but B only 40
    assert all(ratio.low is None and ratio.high is None for ratio in ratios.values())


def test_a_time_of_zero_has_no_ratio() -> None:
    instant = make_run(1.0)
    for answer in instant.answers:
        answer.arrival_times = [answer.arrival_times[0]] * 5
    names = [ratio.name for ratio in compare_runs([instant] * 6, [make_run(1.0)] * 6).ratios]
    assert names == ["output tok/s", "ttft p50", "ttft p99", "e2el p50", "e2el p99"]


def test_a_server_rarely_differs_from_itself_on_a_changing_machine() -> None:
    rng, differences = random.Random(3), 0
    for _ in range(20):
        machine_speeds = [rng.uniform(0.5, 1.5) for _ in range(8)]
        sides = [
            [make_run(machine_speed * rng.gauss(1, 0.05), 4) for machine_speed in machine_speeds]
            for _ in range(2)
        ]
        rate = compare_runs(*sides).ratios[0]
        assert rate.low is not None and rate.high is not None
        differences += not rate.low <= 1 <= rate.high
    assert differences <= 3
