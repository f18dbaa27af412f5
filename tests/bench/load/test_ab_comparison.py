"""Two servers in comparison: ratios that can be checked by hand, and valid intervals."""

import random

import pytest

from llmcli.bench.load import ab_comparison
from llmcli.bench.load.ab_comparison import compare_runs
from llmcli.bench.load.generator import Load, LoadRun
from llmcli.bench.load.records import LoadAnswer


def turn(speed: float, count: int = 20) -> LoadRun:
    """A turn in which everything takes 1/speed of what it takes at 1: first text after 0.1 s, then
    10 a second.
    """
    answers = []
    for number in range(count):
        due = number / speed
        stamps = [due + (0.1 + 0.1 * at) / speed for at in range(5)]
        answers.append(LoadAnswer(due, due, stamps[-1], stamps, [1] * 5, 10, 0, 5, measured=True))
    return LoadRun(Load("closed", 1), answers, 0.0, count / speed)


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ab_comparison, "BOOTSTRAP_DRAWS", 40)


def test_ratios_are_bs_in_units_of_as() -> None:
    found = {one.name: one for one in compare_runs([turn(1.0)] * 8, [turn(2.0)] * 8).ratios}
    assert found["output tok/s"].ratio == pytest.approx(2)
    assert (found["output tok/s"].a, found["output tok/s"].b) == pytest.approx((5, 10))
    for name in ("ttft p50", "ttft p99", "tpot p50", "itl p99", "e2el p50"):
        assert found[name].ratio == pytest.approx(0.5)
        assert (found[name].low, found[name].high) == pytest.approx((0.5, 0.5))
    assert found["ttft p50"].a == pytest.approx(100)


def test_a_percentile_that_too_few_requests_make_is_left_out_and_few_turns_tell_no_interval() -> (
    None
):
    found = {one.name: one for one in compare_runs([turn(1.0)] * 4, [turn(2.0)] * 4).ratios}
    assert "ttft p99" not in found  # 80 requests
    assert "itl p99" in found  # 320 gaps
    names = [one.name for one in compare_runs([turn(1.0)] * 8, [turn(1.0, 5)] * 8).ratios]
    assert "ttft p99" not in names  # 160 requests of one side, 40 of the other
    assert all(one.low is None and one.high is None for one in found.values())


def test_there_is_no_ratio_to_what_took_no_time() -> None:
    at_once = turn(1.0)
    for answer in at_once.answers:
        answer.arrival_times = [answer.arrival_times[0]] * 5
    names = [one.name for one in compare_runs([at_once] * 6, [turn(1.0)] * 6).ratios]
    assert names == ["output tok/s", "ttft p50", "ttft p99", "e2el p50", "e2el p99"]


def test_a_server_and_itself_are_level_whatever_the_machine_does_meanwhile() -> None:
    rng, apart = random.Random(3), 0
    for _ in range(20):
        moods = [rng.uniform(0.5, 1.5) for _ in range(8)]
        sides = [[turn(mood * rng.gauss(1, 0.05), 4) for mood in moods] for _ in range(2)]
        rate = compare_runs(*sides).ratios[0]
        assert rate.low is not None and rate.high is not None
        apart += not rate.low <= 1 <= rate.high
    assert apart <= 3
