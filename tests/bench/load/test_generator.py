"""The times at which requests are sent, with a fake clock: who is measured, and from when."""

import asyncio
import random
import time
from collections.abc import Callable, Iterator
from itertools import islice, pairwise
from statistics import fmean, pstdev
from typing import Any

import pytest

from llmcli.bench.load import generator
from llmcli.bench.load.generator import Load, LoadLength, LoadRun
from llmcli.bench.load.records import LoadAnswer, LoadJob

Jump = Callable[[Any], Any]


def jobs() -> Iterator[LoadJob]:
    while True:
        yield LoadJob("x", 1)


class Slow:
    """A server that takes `seconds` for a request, `at_once` of them together."""

    def __init__(self, seconds: float = 1.0, at_once: int = 1000) -> None:
        self.seconds, self.places = seconds, asyncio.Semaphore(at_once)
        self.open = self.most = 0

    async def __call__(self, job: LoadJob, answer: LoadAnswer) -> None:
        self.open += 1
        self.most = max(self.most, self.open)
        try:
            async with self.places:
                answer.sent = generator.time.perf_counter()
                await asyncio.sleep(self.seconds)
                answer.arrival_times, answer.token_counts = [generator.time.perf_counter()], [1]
                answer.ended = generator.time.perf_counter()
        finally:
            self.open -= 1


def test_a_closed_loop_keeps_so_many_open_and_leaves_the_first_out(jumping: Jump) -> None:
    server = Slow()
    run: LoadRun = jumping(
        generator.generate_load(server, jobs(), Load("closed", 3), LoadLength(6, warmup=3))
    )
    assert (server.most, server.open) == (3, 0)
    assert [one.measured for one in run.answers[:9]] == [False] * 3 + [True] * 6
    assert all(one.e2el == pytest.approx(1) for one in run.measured_answers)
    # The third round keeps the server full while the second is measured, and is then left.
    assert all(one.ended is None for one in run.answers[9:])
    assert (run.ended - run.began) == pytest.approx(2)


@pytest.mark.parametrize("apart", [0.0, 0.2])
def test_users_in_step_and_users_one_after_the_other_are_measured_for_as_long(
    apart: float, jumping: Jump
) -> None:
    class Apart(Slow):
        came = 0

        async def __call__(self, job: LoadJob, answer: LoadAnswer) -> None:
            self.came += 1
            await asyncio.sleep(apart * (self.came - 1) if self.came <= 4 else 0)
            await super().__call__(job, answer)

    run: LoadRun = jumping(
        generator.generate_load(Apart(), jobs(), Load("closed", 4), LoadLength(8, warmup=4))
    )
    assert (run.ended - run.began) == pytest.approx(2)
    assert all(one.ended for one in run.measured_answers)


def test_an_open_loop_does_not_wait_and_counts_from_when_a_request_was_due(jumping: Jump) -> None:
    stalled = Slow(seconds=1.0, at_once=1)  # one a second, two a second are due
    run: LoadRun = jumping(
        generator.generate_load(stalled, jobs(), Load("constant", 2.0), LoadLength(40, warmup=0))
    )
    due = [one.scheduled for one in run.measured_answers]
    assert [after - before for before, after in pairwise(due)] == pytest.approx([0.5] * 39)
    assert [one.ttft for one in run.measured_answers] == pytest.approx(
        [1 + 0.5 * at for at in range(40)]
    )
    assert run.is_saturated
    quick: LoadRun = jumping(
        generator.generate_load(Slow(), jobs(), Load("constant", 2.0), LoadLength(40, warmup=0))
    )
    assert [one.ttft for one in quick.measured_answers] == pytest.approx([1.0] * 40)
    assert not quick.is_saturated


def test_seconds_are_enough_also_where_nobody_is_open_when_they_are_over(jumping: Jump) -> None:
    run: LoadRun = jumping(
        generator.generate_load(
            Slow(0.1), jobs(), Load("constant", 1.0), LoadLength(None, 5.5, warmup=0)
        )
    )
    assert len(run.measured_answers) == 6
    both: LoadRun = jumping(
        generator.generate_load(Slow(), jobs(), Load("closed", 2), LoadLength(3, 4.5, warmup=0))
    )
    assert len(both.measured_answers) == 10


def test_a_run_ends_when_enough_is_known(jumping: Jump) -> None:
    def third(run: LoadRun, answer: LoadAnswer) -> bool:
        return sum(one.ended is not None for one in run.measured_answers) >= 3

    run: LoadRun = jumping(
        generator.generate_load(
            Slow(), jobs(), Load("closed", 1), LoadLength(50), should_stop=third
        )
    )
    assert run.was_stopped
    assert sum(one.ended is not None for one in run.measured_answers) == 3


def test_a_queue_without_end_is_left(jumping: Jump, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generator, "MAX_OPEN_REQUESTS", 20)
    run: LoadRun = jumping(
        generator.generate_load(Slow(1e6), jobs(), Load("constant", 5.0), LoadLength(100))
    )
    assert run.was_stopped


def test_a_bug_in_the_client_is_no_silence(jumping: Jump) -> None:
    async def broken(job: LoadJob, answer: LoadAnswer) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        jumping(generator.generate_load(broken, jobs(), Load("closed", 1), LoadLength(1)))


@pytest.mark.parametrize(
    ("arrivals", "variation"), [("constant", 0.0), ("poisson", 1.0), ("gamma", 2.0)]
)
def test_gaps_have_the_mean_and_the_bursts_that_were_asked_for(
    arrivals: Any, variation: float
) -> None:
    found = list(
        islice(
            generator.arrival_gaps(Load(arrivals, 5.0, burstiness=4.0), random.Random(1)), 20_000
        )
    )
    assert fmean(found) == pytest.approx(0.2, rel=0.05)
    assert pstdev(found) / fmean(found) == pytest.approx(variation, rel=0.06)


def test_the_clock_of_a_real_run_is_the_one_that_stamps() -> None:
    assert generator.time is time
