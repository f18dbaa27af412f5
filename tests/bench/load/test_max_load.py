"""The search for the largest load with a fake clock: what is measured, when it stops, what it
prints.
"""

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


class Places:
    """A server that answers `places` at a time, each within `seconds`; the others wait. `runs` are
    the loads it got.

    Of a load above `most` it refuses everything.
    """

    def __init__(
        self,
        places: int = 8,
        seconds: Callable[[int], float] = lambda runs: 1.0,
        most: float = math.inf,
    ) -> None:
        self.places, self.seconds, self.most = places, seconds, most
        self.runs: list[Load] = []

    async def ask(self, job: LoadJob, answer: LoadAnswer) -> None:
        if self.runs[-1].level > self.most:
            answer.error, answer.ended = "http 429", generator.time.perf_counter()
            return
        async with self.free:
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
        self.free = asyncio.Semaphore(self.places)
        self.runs.append(load)
        return await generator.generate_load(
            self.ask, repeat(LoadJob("x", 1)), load, length, should_stop=should_stop
        )


def searched(
    jumping: Jump, server: Places, kind: max_load.LoadKind, rules: MaxLoadSettings
) -> MaxLoadResult:
    return jumping(
        max_load.find_max_load(cast(ServerSession, server), kind, rules, None, 1, lambda name: None)
    )


def test_users_are_found_with_what_they_got(jumping: Jump) -> None:
    """Of 8 places with a second each: the ninth user waits two. The curve jumps, and nothing lies
    on a line.
    """
    server = Places()
    told = searched(jumping, server, "concurrency", MaxLoadSettings(Slo({"e2el": 1600})))
    assert (told.level, told.next_level, told.steps, told.drift) == (8, 9, 1, None)
    assert told.low is not None and told.high is not None and 7 < told.low <= told.high <= 9
    assert told.best_metrics is not None
    assert told.best_metrics.requests > 40  # all measurements of the level
    assert [load.level for load in server.runs[:6]] == [1, 1, 2, 4, 8, 16]
    assert server.runs[-1] == Load("closed", 1)  # one alone again, at the end


def test_a_rate_is_found_from_that_of_one_alone_and_a_queue_that_grows_does_not_hold(
    jumping: Jump,
) -> None:
    server = Places()
    told = searched(
        jumping, server, "rate", MaxLoadSettings(Slo({"e2el": 1e6}), arrivals="constant")
    )
    assert server.runs[1].level == pytest.approx(1, rel=0.1)
    assert told.level is not None
    assert 7 < told.level <= 8.2


def test_far_from_the_promise_a_level_is_left_early(jumping: Jump) -> None:
    told = searched(
        jumping, Places(), "concurrency", MaxLoadSettings(Slo({"e2el": 4200}), requests=200)
    )
    early = {one.level: one.metrics.requests for one in told.measurements if one.metrics.stopped}
    assert early[1] == max_load.MIN_CLEAR_ANSWERS
    assert all(count < 200 for count in early.values())
    assert told.level in (28, 32)


def test_a_machine_that_changes_meanwhile_is_told(jumping: Jump) -> None:
    slower = Places(seconds=lambda runs: 1.0 if runs < 10 else 1.3)
    told = searched(jumping, slower, "concurrency", MaxLoadSettings(Slo({"e2el": 1600})))
    assert told.drift == pytest.approx(1.3)


def test_what_is_typed_is_what_is_measured(jumping: Jump) -> None:
    rules = MaxLoadSettings(
        Slo({"e2el": 3000}),
        requests=20,
        seconds=30.0,
        warmup=3,
        max_measurements=4,
        arrivals="constant",
    )
    told = searched(jumping, Places(), "rate", rules)
    assert len(told.measurements) == 4
    first = told.measurements[0].metrics
    assert first.requests == math.ceil(told.measurements[0].level * 30)


def test_a_load_that_is_refused_altogether_does_not_hold(jumping: Jump) -> None:
    told = searched(jumping, Places(most=5), "concurrency", MaxLoadSettings(Slo({"e2el": 1600})))
    assert (told.level, told.next_level) == (5, 6)


def test_where_measurements_run_out_nothing_is_said_of_what_was_not_tried(jumping: Jump) -> None:
    told = searched(
        jumping, Places(), "concurrency", MaxLoadSettings(Slo({"e2el": 1600}), max_measurements=3)
    )
    assert (told.level, told.next_level, told.high) == (4, None, None)
    told = searched(
        jumping, Places(), "concurrency", MaxLoadSettings(Slo({"e2el": 1600}), max_measurements=5)
    )
    assert (told.level, told.next_level, told.high) == (8, 16, 16)


def test_a_promise_that_nothing_keeps_is_tried_more_than_once(jumping: Jump) -> None:
    told = searched(jumping, Places(), "concurrency", MaxLoadSettings(Slo({"e2el": 900})))
    assert (told.level, told.next_level, told.best_metrics, told.low) == (None, 1, None, None)
    assert [one.level for one in told.measurements] == [1, 1, 1]
