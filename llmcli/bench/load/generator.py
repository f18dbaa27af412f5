"""Generation of load on a server. In a closed loop, a fixed number of requests is open at any time:
a new request is sent when an answer ends. In an open loop, requests are sent at given times,
whether or not earlier requests are answered.

The load stays constant during the measurement. The first requests do not count, and further
requests are sent until the last counted request is answered. Then the unfinished requests are
canceled.

In an open loop, the waiting time of a request starts when the request is due, even if the client
sends it late. Otherwise a stalled server would delay the sending of later requests, and their
measured times would not show the stall (coordinated omission).
"""

import asyncio
import math
import random
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from llmcli.bench.load import saturation
from llmcli.bench.load.records import LoadAnswer, LoadJob

SendRequest = Callable[[LoadJob, LoadAnswer], Awaitable[None]]
Arrivals = Literal["closed", "poisson", "gamma", "constant"]
ARRIVAL_KINDS: tuple[Arrivals, ...] = ("poisson", "gamma", "constant")
BLOCK_REQUESTS = 40  # in an open loop, each block of this many requests has exactly the set rate
HEARTBEAT_SECONDS = 0.02  # seconds between two measurements of how late the event loop wakes up
# an open loop ends when this many requests are unanswered; more of them would show nothing new
MAX_OPEN_REQUESTS = 4096


@dataclass(frozen=True, slots=True)
class Load:
    """A load on a server. `level`: the number of parallel requests if `arrivals` is "closed",
    otherwise the requests per second.

    `burstiness`: only used for "gamma", whose gaps between requests have the shape parameter
    1/burstiness. A value of 1 is a Poisson process; higher values are burstier. `seed`: seed of the
    random gaps.
    """

    arrivals: Arrivals
    level: float
    burstiness: float = 4.0
    seed: int = 0

    @property
    def is_closed(self) -> bool:
        """Whether a new request is only sent when an earlier one is answered."""
        return self.arrivals == "closed"

    @property
    def name(self) -> str:
        """A readable name of the load."""
        if self.is_closed:
            return f"{self.level:g} at once"
        shape = f"gamma({self.burstiness:g})" if self.arrivals == "gamma" else self.arrivals
        return f"{self.level:g}/s {shape}"


@dataclass(frozen=True, slots=True)
class LoadLength:
    """The length of a measurement, which ends when it has `requests` requests and has lasted
    `seconds`. None: this value does not matter.

    `warmup`: the number of first requests that do not count. None: one request per user in a closed
    loop; in an open loop, the requests of two seconds, at most 20.
    """

    requests: int | None = 100
    seconds: float | None = None
    warmup: int | None = None

    def warmup_requests(self, load: Load) -> int:
        """Return the number of first requests that do not count."""
        if self.warmup is not None:
            return self.warmup
        return int(load.level) if load.is_closed else min(20, math.ceil(2 * load.level))


@dataclass(slots=True)
class LoadRun:
    """The answers to one load, which is a series of requests. Times are seconds of
    `time.perf_counter`.

    `answers`: all answers. Those to warm-up requests, and to requests that only keep the server
    busy at the end, do not count in the statistics. `began`: when the first counted request was
    due. `ended`: the end of the measurement (see `LoadGenerator._ended`). `lateness`: one value per
    HEARTBEAT_SECONDS: how late the client's event loop woke up. `cpu_seconds`: the
    client's CPU time, which shows whether the client itself limited the speed. `was_stopped`: the
    run was ended early.
    """

    load: Load
    answers: list[LoadAnswer] = field(default_factory=list)
    began: float = 0.0
    ended: float = 0.0
    lateness: list[float] = field(default_factory=list)
    cpu_seconds: float = 0.0
    was_stopped: bool = False

    @property
    def measured_answers(self) -> list[LoadAnswer]:
        """The answers of the requests that count."""
        return [answer for answer in self.answers if answer.measured]

    @property
    def is_saturated(self) -> bool:
        """Whether requests arrived faster than they were answered (open loop only)."""
        answers = [answer for answer in self.measured_answers if answer.arrival_times]
        return not self.load.is_closed and saturation.is_falling_behind(
            [answer.scheduled for answer in answers],
            [float(answer.open_requests) for answer in answers],
            [answer.ttft for answer in answers],
        )


StopCheck = Callable[[LoadRun, LoadAnswer], bool]


class LoadGenerator:
    """Generates one load on one server, records the answers, and ends the run when all counted
    requests are answered.

    `should_stop` is called with each counted answer; if it returns True, the run ends early. `tick`
    is called after each counted answer, to show progress.
    """

    def __init__(
        self,
        send: SendRequest,
        jobs: Iterator[LoadJob],
        load: Load,
        length: LoadLength,
        should_stop: StopCheck,
        tick: Callable[[], None],
    ) -> None:
        self.send, self.jobs, self.load, self.length = send, jobs, load, length
        self.should_stop, self.tick = should_stop, tick
        self.run = LoadRun(load)
        self.warmup_requests = length.warmup_requests(load)
        self.sent = self.n_counted = self.n_open = self.n_unanswered = 0
        self.finished = asyncio.Event()

    async def measure(self) -> LoadRun:
        """Generate the load until all counted requests are answered, then cancel the unfinished
        requests and return the result.
        """
        began = time.process_time()
        senders = self._closed() if self.load.is_closed else [self._open_loop()]
        tasks = [asyncio.create_task(load_task) for load_task in (self._watch(), *senders)]
        waiting = asyncio.create_task(self.finished.wait())
        try:
            done, _ = await asyncio.wait([waiting, *tasks], return_when=asyncio.FIRST_COMPLETED)
            for task in done - {waiting}:
                task.result()  # re-raise the exception of a task that failed
        finally:
            for task in (waiting, *tasks):
                task.cancel()
            await asyncio.gather(waiting, *tasks, return_exceptions=True)
        self.run.ended = self._ended()
        self.run.cpu_seconds = time.process_time() - began
        return self.run

    def _ended(self) -> float:
        """Return the end of the measurement, in seconds of `time.perf_counter`.

        In an open loop, this is the end of the last counted answer. In a closed loop with n counted
        requests, it is the n-th end of any answer after the start. The last counted answers share
        the server with requests that do not count. A server that answers one request after another
        would lose the time that it spends on those requests.
        """
        end_times = [answer.ended for answer in self.run.measured_answers if answer.ended]
        if not end_times:
            return time.perf_counter()
        all_end_times = sorted(
            answer.ended
            for answer in self.run.answers
            if answer.ended and answer.ended > self.run.began
        )
        return (
            all_end_times[len(end_times) - 1]
            if self.load.is_closed and len(all_end_times) >= len(end_times)
            else max(end_times)
        )

    def _closed(self) -> list[Awaitable[None]]:
        return [self._worker() for _ in range(int(self.load.level))]

    async def _worker(self) -> None:
        while True:
            await self._send_next(time.perf_counter())

    async def _open_loop(self) -> None:
        rng = random.Random(self.load.seed)
        due = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for gap in arrival_gaps(self.load, rng):
                due += gap
                await asyncio.sleep(max(0.0, due - time.perf_counter()))
                if self.n_open >= MAX_OPEN_REQUESTS:
                    self.run.was_stopped = True
                    self.finished.set()
                    await asyncio.sleep(math.inf)
                group.create_task(self._send_next(due))

    async def _send_next(self, due: float) -> None:
        """Send the next request, which is due at `due`, and record its answer. Ends the run after
        the last counted answer.
        """
        answer = LoadAnswer(due, open_requests=self.n_open)
        answer.measured = self._count_request(due)
        self.run.answers.append(answer)
        self.sent += 1
        self.n_open += 1
        try:
            await self.send(next(self.jobs), answer)
        finally:
            self.n_open -= 1
        if answer.measured:
            self.n_unanswered -= 1
            self.tick()
            if self.should_stop(self.run, answer):
                self.run.was_stopped = True
                self.finished.set()
            elif not self.n_unanswered and self._complete(time.perf_counter()):
                self.finished.set()
        if answer.error:
            # send slowly to a server that refuses requests immediately
            await asyncio.sleep(0.01)

    def _count_request(self, due: float) -> bool:
        """Decide whether the request that is due at `due` belongs to the measurement. If it does,
        count it and return True.
        """
        if self.sent < self.warmup_requests:
            return False
        if not self.n_counted:
            self.run.began = due
        elif self._complete(due):
            return False
        self.n_counted += 1
        self.n_unanswered += 1
        return True

    def _complete(self, now: float) -> bool:
        """Return whether the measurement has enough requests and has lasted long enough, so that
        further requests do not count.
        """
        length = self.length
        return self.n_counted >= (length.requests or 1) and now - self.run.began >= (
            length.seconds or 0
        )

    async def _watch(self) -> None:
        """Record how late the event loop wakes up, because every recorded time may be that late.
        Also end the run when its time is over and every counted request is answered.
        """
        while True:
            due = time.perf_counter() + HEARTBEAT_SECONDS
            await asyncio.sleep(HEARTBEAT_SECONDS)
            if self.n_counted:
                now = time.perf_counter()
                self.run.lateness.append(now - due)
                if not self.n_unanswered and self._complete(now):
                    self.finished.set()


def arrival_gaps(load: Load, rng: random.Random) -> Iterator[float]:
    """Yield the gaps between requests in seconds, endlessly. Their mean is 1 / level.

    Each block of BLOCK_REQUESTS gaps takes exactly BLOCK_REQUESTS / level seconds. In a pure
    Poisson process, the rate of such a block would deviate from the level, and two searches for the
    largest rate would not agree.
    """
    while True:
        block = [_gap(load, rng) for _ in range(BLOCK_REQUESTS)]
        scale = BLOCK_REQUESTS / load.level / sum(block)
        yield from (gap * scale for gap in block)


def _gap(load: Load, rng: random.Random) -> float:
    """Return one random gap between requests, relative to the mean gap."""
    match load.arrivals:
        case "constant":
            return 1.0
        case "gamma":
            return rng.gammavariate(1 / load.burstiness, load.burstiness)
        case _:
            return rng.expovariate(1.0)


async def generate_load(
    send: SendRequest,
    jobs: Iterator[LoadJob],
    load: Load,
    length: LoadLength,
    *,
    should_stop: StopCheck = lambda run, answer: False,
    tick: Callable[[], None] = lambda: None,
) -> LoadRun:
    """Generate a load on a server, and return the recorded answers. `jobs`: the requests to send,
    an endless iterator. `should_stop` and `tick`: see `LoadGenerator`.
    """
    return await LoadGenerator(send, jobs, load, length, should_stop, tick).measure()
