"""Load generation with a fake clock: when requests are sent, which of them count, and when a run
ends.
"""

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


class SlowServer:
    """A server that takes `seconds` for a request and answers at most `at_once` requests in
    parallel.
    """

    def __init__(self, seconds: float = 1.0, at_once: int = 1000) -> None:
        self.seconds, self.free_slots = seconds, asyncio.Semaphore(at_once)
        self.n_open = self.max_open = 0

    async def __call__(self, job: LoadJob, answer: LoadAnswer) -> None:
        self.n_open += 1
        self.max_open = max(self.max_open, self.n_open)
        try:
            async with self.free_slots:
                answer.sent = generator.time.perf_counter()
                await asyncio.sleep(self.seconds)
                answer.arrival_times, answer.token_counts = [generator.time.perf_counter()], [1]
                answer.ended = generator.time.perf_counter()
        finally:
            self.n_open -= 1


def test_a_closed_loop_keeps_its_number_of_requests_open(jumping: Jump) -> None:
    server = SlowServer()
    run: LoadRun = jumping(
        generator.generate_load(server, jobs(), Load("closed", 3), LoadLength(6, warmup=3))
    )
    assert (server.max_open, server.n_open) == (3, 0)
    assert [answer.measured for answer in run.answers[:9]] == [False] * 3 + [True] * 6
    assert all(answer.e2el == pytest.approx(1) for answer in run.measured_answers)
    # The third round keeps the load constant while the second is measured, and is then canceled.
    assert all(answer.ended is None for answer in run.answers[9:])
    assert (run.ended - run.began) == pytest.approx(2)


@pytest.mark.parametrize("delay", [0.0, 0.2])
def test_simultaneous_and_staggered_users_are_measured_for_the_same_time(
    delay: float, jumping: Jump
) -> None:
    class StaggeredServer(SlowServer):
        n_requests = 0

        async def __call__(self, job: LoadJob, answer: LoadAnswer) -> None:
            self.n_requests += 1
            await asyncio.sleep(delay * (self.n_requests - 1) if self.n_requests <= 4 else 0)
            await super().__call__(job, answer)

    run: LoadRun = jumping(
        generator.generate_load(
            StaggeredServer(), jobs(), Load("closed", 4), LoadLength(8, warmup=4)
        )
    )
    assert (run.ended - run.began) == pytest.approx(2)
    assert all(answer.ended for answer in run.measured_answers)


def test_an_open_loop_does_not_wait_and_measures_from_the_due_time(jumping: Jump) -> None:
    # answers one request per second, but two per second are due
    stalled = SlowServer(seconds=1.0, at_once=1)
    run: LoadRun = jumping(
        generator.generate_load(stalled, jobs(), Load("constant", 2.0), LoadLength(40, warmup=0))
    )
    due = [answer.scheduled for answer in run.measured_answers]
    assert [after - before for before, after in pairwise(due)] == pytest.approx([0.5] * 39)
    assert [answer.ttft for answer in run.measured_answers] == pytest.approx(
        [1 + 0.5 * at for at in range(40)]
    )
    assert run.is_saturated
    quick: LoadRun = jumping(
        generator.generate_load(
            SlowServer(), jobs(), Load("constant", 2.0), LoadLength(40, warmup=0)
        )
    )
    assert [answer.ttft for answer in quick.measured_answers] == pytest.approx([1.0] * 40)
    assert not quick.is_saturated


def test_a_run_ends_after_its_seconds_even_without_open_requests(jumping: Jump) -> None:
    run: LoadRun = jumping(
        generator.generate_load(
            SlowServer(0.1), jobs(), Load("constant", 1.0), LoadLength(None, 5.5, warmup=0)
        )
    )
    assert len(run.measured_answers) == 6
    two_users: LoadRun = jumping(
        generator.generate_load(
            SlowServer(), jobs(), Load("closed", 2), LoadLength(3, 4.5, warmup=0)
        )
    )
    assert len(two_users.measured_answers) == 10


def test_should_stop_ends_a_run_early(jumping: Jump) -> None:
    def after_three_answers(run: LoadRun, answer: LoadAnswer) -> bool:
        return sum(answer.ended is not None for answer in run.measured_answers) >= 3

    run: LoadRun = jumping(
        generator.generate_load(
            SlowServer(), jobs(), Load("closed", 1), LoadLength(50), should_stop=after_three_answers
        )
    )
    assert run.was_stopped
    assert sum(answer.ended is not None for answer in run.measured_answers) == 3


def test_an_endless_queue_ends_the_run(jumping: Jump, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generator, "MAX_OPEN_REQUESTS", 20)
    run: LoadRun = jumping(
        generator.generate_load(SlowServer(1e6), jobs(), Load("constant", 5.0), LoadLength(100))
    )
    assert run.was_stopped


def test_an_exception_of_the_client_is_raised(jumping: Jump) -> None:
    async def broken(job: LoadJob, answer: LoadAnswer) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        jumping(generator.generate_load(broken, jobs(), Load("closed", 1), LoadLength(1)))


@pytest.mark.parametrize(
    ("arrivals", "variation"), [("constant", 0.0), ("poisson", 1.0), ("gamma", 2.0)]
)
def test_gaps_have_the_requested_mean_and_burstiness(arrivals: Any, variation: float) -> None:
    gaps = list(
        islice(
            generator.arrival_gaps(Load(arrivals, 5.0, burstiness=4.0), random.Random(1)), 20_000
        )
    )
    assert fmean(gaps) == pytest.approx(0.2, rel=0.05)
    assert pstdev(gaps) / fmean(gaps) == pytest.approx(variation, rel=0.06)


def test_a_real_run_uses_the_real_clock() -> None:
    assert generator.time is time
