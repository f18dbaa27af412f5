"""When requests are sent: so many at once (closed loop), or at times that do not wait for answers
(open loop).

The load stays constant while it is measured: the first requests do not count, and after the last
measured one more are sent until that one is answered; then the client leaves them. In an open loop
a request is due at its own time, and its wait counts from that time even if the client was late. So
a server that stalls cannot hide it by delaying the next request (coordinated omission).
"""

import asyncio
import math
import random
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from llmcli.bench.load import saturation
from llmcli.bench.load.records import Answer, Job

Ask = Callable[[Job, Answer], Awaitable[None]]
Arrivals = Literal["closed", "poisson", "gamma", "constant"]
ARRIVALS: tuple[Arrivals, ...] = ("poisson", "gamma", "constant")
BLOCK = 40  # requests after which an open loop is on time again
HEARTBEAT = 0.02  # seconds between looks at the loop's own lateness
MOST_WAITING = 4096  # requests that may be open at once in an open loop: more do not tell more


@dataclass(frozen=True, slots=True)
class Load:
    """How much is asked: `level` requests at once ("closed"), or a second. `burstiness`: the gaps
    of "gamma" have the shape 1/burstiness, so 1 is Poisson and more comes in bursts. `seed` is of
    the gaps.
    """

    arrivals: Arrivals
    level: float
    burstiness: float = 4.0
    seed: int = 0

    @property
    def closed(self) -> bool:
        """Whether a new request waits for an answer."""
        return self.arrivals == "closed"

    @property
    def name(self) -> str:
        """As people say it."""
        if self.closed:
            return f"{self.level:g} at once"
        shape = f"gamma({self.burstiness:g})" if self.arrivals == "gamma" else self.arrivals
        return f"{self.level:g}/s {shape}"


@dataclass(frozen=True, slots=True)
class Length:
    """How long is measured: until `requests` were sent and `seconds` are over, whichever are given;
    after `warmup` requests that do not count (None: one round of a closed loop, two seconds' worth
    of an open one).
    """

    requests: int | None = 100
    seconds: float | None = None
    warmup: int | None = None

    def first(self, load: Load) -> int:
        """Requests that do not count."""
        if self.warmup is not None:
            return self.warmup
        return int(load.level) if load.closed else min(20, math.ceil(2 * load.level))


@dataclass(slots=True)
class Run:
    """What one load gave. `answers` are all, also those that do not count; it was measured from
    `began`, when the first that counts was due, to `ended`, when as many had ended as count (open
    loop: when those had).

    `late` is how late the client's own loop was, every HEARTBEAT, and `cpu` its seconds of CPU:
    what it adds to times, and whether it was itself what limited. `stopped`: enough was known
    before the end.
    """

    load: Load
    answers: list[Answer] = field(default_factory=list)
    began: float = 0.0
    ended: float = 0.0
    late: list[float] = field(default_factory=list)
    cpu: float = 0.0
    stopped: bool = False

    @property
    def measured(self) -> list[Answer]:
        """Those that count."""
        return [one for one in self.answers if one.measured]

    @property
    def saturated(self) -> bool:
        """Whether requests came faster than they were answered (open loop); see saturation.py."""
        told = [one for one in self.measured if one.stamps]
        return not self.load.closed and saturation.growing(
            [one.scheduled for one in told],
            [float(one.beside) for one in told],
            [one.ttft for one in told],
        )


Enough = Callable[[Run, Answer], bool]


class Driver:
    """One load on one server: sends, counts who is open, and knows when it is enough.

    `enough` is shown each measured answer, and ends the run early where it says so; `tick` is told
    of each.
    """

    def __init__(
        self,
        ask: Ask,
        jobs: Iterator[Job],
        load: Load,
        length: Length,
        enough: Enough,
        tick: Callable[[], None],
    ) -> None:
        self.ask, self.jobs, self.load, self.length = ask, jobs, load, length
        self.enough, self.tick = enough, tick
        self.run = Run(load)
        self.first = length.first(load)
        self.sent = self.counted = self.open = self.left = 0
        self.over = asyncio.Event()

    async def measure(self) -> Run:
        """Drive the load until all that counts is answered; the rest is left."""
        began = time.process_time()
        loads = self._closed() if self.load.closed else [self._open_loop()]
        tasks = [asyncio.create_task(one) for one in (self._watch(), *loads)]
        waiting = asyncio.create_task(self.over.wait())
        try:
            done, _ = await asyncio.wait([waiting, *tasks], return_when=asyncio.FIRST_COMPLETED)
            for task in done - {waiting}:
                task.result()  # a bug of ours crashes here
        finally:
            for task in (waiting, *tasks):
                task.cancel()
            await asyncio.gather(waiting, *tasks, return_exceptions=True)
        self.run.ended = self._ended()
        self.run.cpu = time.process_time() - began
        return self.run

    def _ended(self) -> float:
        """When the last that counts had ended; in a closed loop, when as many had ended since it
        began as count.

        Until the last itself ends a closed loop has asked for more: a server that lets eight
        answers end one after the other would then be charged with the prompts of seven that hardly
        speak yet, one that lets them end together with none (8 users of 512 tokens: 0.90 of the
        same tokens a second, 2026-11-22).
        """
        counted = [one.ended for one in self.run.measured if one.ended]
        if not counted:
            return time.perf_counter()
        since = sorted(
            one.ended for one in self.run.answers if one.ended and one.ended > self.run.began
        )
        return (
            since[len(counted) - 1]
            if self.load.closed and len(since) >= len(counted)
            else max(counted)
        )

    def _closed(self) -> list[Awaitable[None]]:
        return [self._worker() for _ in range(int(self.load.level))]

    async def _worker(self) -> None:
        while True:
            await self._one(time.perf_counter())

    async def _open_loop(self) -> None:
        rng = random.Random(self.load.seed)
        due = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for gap in gaps(self.load, rng):
                due += gap
                await asyncio.sleep(max(0.0, due - time.perf_counter()))
                if self.open >= MOST_WAITING:
                    self.run.stopped = True
                    self.over.set()
                    await asyncio.sleep(math.inf)
                group.create_task(self._one(due))

    async def _one(self, due: float) -> None:
        """One request from its time to its end; the last one that counts ends the run."""
        answer = Answer(due, beside=self.open)
        answer.measured = self._counts(due)
        self.run.answers.append(answer)
        self.sent += 1
        self.open += 1
        try:
            await self.ask(next(self.jobs), answer)
        finally:
            self.open -= 1
        if answer.measured:
            self.left -= 1
            self.tick()
            if self.enough(self.run, answer):
                self.run.stopped = True
                self.over.set()
            elif not self.left and self._complete(time.perf_counter()):
                self.over.set()
        if answer.error:
            await asyncio.sleep(
                0.01
            )  # a server that refuses at once is not asked a thousand times a second

    def _counts(self, due: float) -> bool:
        """Whether a request that is due now is measured."""
        if self.sent < self.first:
            return False
        if not self.counted:
            self.run.began = due
        elif self._complete(due):
            return False
        self.counted += 1
        self.left += 1
        return True

    def _complete(self, now: float) -> bool:
        """Whether all that counts was sent."""
        length = self.length
        return self.counted >= (length.requests or 1) and now - self.run.began >= (
            length.seconds or 0
        )

    async def _watch(self) -> None:
        """How late this loop wakes up: what it would add to any stamp. It also ends a run whose
        time is over.
        """
        while True:
            due = time.perf_counter() + HEARTBEAT
            await asyncio.sleep(HEARTBEAT)
            if self.counted:
                now = time.perf_counter()
                self.run.late.append(now - due)
                if not self.left and self._complete(now):
                    self.over.set()


def gaps(load: Load, rng: random.Random) -> Iterator[float]:
    """Endless seconds between requests, 1/level on average.

    Each BLOCK of them takes BLOCK / level seconds: else 40 requests of a Poisson process are a rate
    of its own, 16 % (one sigma) off the one that was asked for, and two searches for the largest
    rate would not agree.
    """
    while True:
        block = [_gap(load, rng) for _ in range(BLOCK)]
        scale = BLOCK / load.level / sum(block)
        yield from (gap * scale for gap in block)


def _gap(load: Load, rng: random.Random) -> float:
    """One gap before it is scaled."""
    match load.arrivals:
        case "constant":
            return 1.0
        case "gamma":
            return rng.gammavariate(1 / load.burstiness, load.burstiness)
        case _:
            return rng.expovariate(1.0)


async def drive(
    ask: Ask,
    jobs: Iterator[Job],
    load: Load,
    length: Length,
    *,
    enough: Enough = lambda run, answer: False,
    tick: Callable[[], None] = lambda: None,
) -> Run:
    """Put a load on a server and measure it."""
    return await Driver(ask, jobs, load, length, enough, tick).measure()
