"""The measurements of the search for the largest load, with a fake clock."""

import asyncio
import math
from collections.abc import Callable
from itertools import repeat
from typing import Any, cast

import pytest

from llmcli.bench.load import generator, max_load
from llmcli.bench.load.generator import Load, LoadLength, LoadRun, StopCheck
from llmcli.bench.load.max_load import MaxLoadResult, MaxLoadSettings
from llmcli.bench.load.records import LoadAnswer, LoadJob
from llmcli.bench.load.session import ServerSession
from llmcli.bench.load.slo import Slo

Jump = Callable[[Any], Any]


class SlotServer:
    """A server with `slots` parallel slots, each of which answers in `seconds`; further requests
    wait. `runs`: the loads that were applied to it.

    It refuses all requests of a load above `max_level`.
    """

    def __init__(
        self,
        slots: int = 8,
        seconds: Callable[[int], float] = lambda runs: 1.0,
        max_level: float = math.inf,
    ) -> None:
        self.slots, self.seconds, self.max_level = slots, seconds, max_level
        self.runs: list[Load] = []

    async def ask(self, job: LoadJob, answer: LoadAnswer) -> None:
        if self.runs[-1].level > self.max_level:
            answer.error, answer.ended = "http 429", generator.time.perf_counter()
            return
        async with self.free_slots:
            await asyncio.sleep(self.seconds(len(self.runs)))
        answer.ended = generator.time.perf_counter()
        answer.arrival_times, answer.token_counts, answer.output_tokens = [answer.ended], [1], 1

    async def run_load(
        self,
        load: Load,
        length: LoadLength,
        number: int,
        *,
        should_stop: StopCheck = lambda run, answer: False,
        may_fail: bool = False,
    ) -> LoadRun:
        self.free_slots = asyncio.Semaphore(self.slots)
        self.runs.append(load)
        return await generator.generate_load(
            self.ask, repeat(LoadJob("x", 1)), load, length, should_stop=should_stop
        )


def run_search(
    jumping: Jump, server: SlotServer, kind: max_load.LoadKind, rules: MaxLoadSettings
) -> MaxLoadResult:
    return jumping(
        max_load.find_max_load(cast(ServerSession, server), kind, rules, None, 1, lambda name: None)
    )


def test_the_largest_number_of_users_is_found_with_its_metrics(jumping: Jump) -> None:
    """With 8 slots that take a second each, the ninth user waits two seconds. The latency jumps at
    this level.
    """
    server = SlotServer()
    result = run_search(jumping, server, "concurrency", MaxLoadSettings(Slo({"e2el": 1600})))
    assert (result.level, result.next_level, result.steps, result.drift) == (8, 9, 1, None)
    assert result.low is not None and result.high is not None and 7 < result.low <= result.high <= 9
    assert result.best_metrics is not None
    assert result.best_metrics.requests > 40  # all measurements of the level
    assert [load.level for load in server.runs[:6]] == [1, 1, 2, 4, 8, 16]
    assert server.runs[-1] == Load("closed", 1)  # a single user is measured at the end


def test_the_rate_search_starts_from_one_users_rate_and_excludes_growing_queues(
    jumping: Jump,
) -> None:
    server = SlotServer()
    result = run_search(
        jumping, server, "rate", MaxLoadSettings(Slo({"e2el": 1e6}), arrivals="constant")
    )
    assert server.runs[1].level == pytest.approx(1, rel=0.1)
    assert result.level is not None
    assert 7 < result.level <= 8.2


def test_levels_far_from_the_limits_end_early(jumping: Jump) -> None:
    result = run_search(
        jumping, SlotServer(), "concurrency", MaxLoadSettings(Slo({"e2el": 4200}), requests=200)
    )
    early = {
        measurement.level: measurement.metrics.requests
        for measurement in result.measurements
        if measurement.metrics.stopped
    }
    assert early[1] == max_load.MIN_CLEAR_ANSWERS
    assert all(count < 200 for count in early.values())
    assert result.level in (28, 32)


def test_a_change_of_the_machines_speed_is_reported_as_drift(jumping: Jump) -> None:
    slower = SlotServer(seconds=lambda runs: 1.0 if runs < 10 else 1.3)
    result = run_search(jumping, slower, "concurrency", MaxLoadSettings(Slo({"e2el": 1600})))
    assert result.drift == pytest.approx(1.3)


def test_the_settings_determine_the_measurements(jumping: Jump) -> None:
    rules = MaxLoadSettings(
        Slo({"e2el": 3000}),
        requests=20,
        seconds=30.0,
        warmup=3,
        max_measurements=4,
        arrivals="constant",
    )
    result = run_search(jumping, SlotServer(), "rate", rules)
    assert len(result.measurements) == 4
    first = result.measurements[0].metrics
    assert first.requests == math.ceil(result.measurements[0].level * 30)


def test_a_level_whose_requests_are_all_refused_does_not_hold(jumping: Jump) -> None:
    result = run_search(
        jumping, SlotServer(max_level=5), "concurrency", MaxLoadSettings(Slo({"e2el": 1600}))
    )
    assert (result.level, result.next_level) == (5, 6)


def test_a_search_without_a_higher_measurement_has_no_upper_limit(jumping: Jump) -> None:
    result = run_search(
        jumping,
        SlotServer(),
        "concurrency",
        MaxLoadSettings(Slo({"e2el": 1600}), max_measurements=3),
    )
    assert (result.level, result.next_level, result.high) == (4, None, None)
    result = run_search(
        jumping,
        SlotServer(),
        "concurrency",
        MaxLoadSettings(Slo({"e2el": 1600}), max_measurements=5),
    )
    assert (result.level, result.next_level, result.high) == (8, 16, 16)


def test_the_lowest_level_is_measured_repeatedly_before_the_search_gives_up(jumping: Jump) -> None:
    result = run_search(jumping, SlotServer(), "concurrency", MaxLoadSettings(Slo({"e2el": 900})))
    assert (result.level, result.next_level, result.best_metrics, result.low) == (
        None,
        1,
        None,
        None,
    )
    assert [measurement.level for measurement in result.measurements] == [1, 1, 1]
