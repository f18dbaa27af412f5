"""The largest load for which a server keeps a promise: measures the levels that search.py asks for.

A level is measured to its last request unless it is clear earlier that it is beyond twice the
promise, or (closed loop) below half of it: crossing.py treats both alike anyway. One user alone is
measured at the beginning, every AGAIN measurements and at the end, to tell whether the machine
changed meanwhile.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from llmcli.bench.load import level_search
from llmcli.bench.load.generator import Arrivals, Length, Load, Run
from llmcli.bench.load.metrics import Figures, figures
from llmcli.bench.load.records import Answer
from llmcli.bench.load.session import Session
from llmcli.bench.load.slo import Slo
from llmcli.bench.load.threshold_fit import CLIP, Seen

Kind = Literal["concurrency", "rate"]
LEAST = 40  # requests of a level
ROUNDS = 2  # requests of each user
SECONDS = 20.0  # of an open loop
FILLING = 10.0  # of them before a queue that grows is more than a server that fills
CLEAR = 10  # answers, and a round of ROUNDS, that are all below half of the promise
ALONE = Length(6, warmup=3)
AGAIN = 10
DRIFTED, SECONDS_OFF = 1.1, 0.02  # times as long, and by so much, that one user alone waits


@dataclass(frozen=True, slots=True)
class Rules:
    """When a level holds: `share` of its requests keep the promise, and no queue grows. A level has
    at least `requests` and takes at least `seconds`; its first `warmup` requests do not count
    (None: see Length). At most `most` measurements are made. `arrivals` and `burstiness` are of the
    open loop.
    """

    slo: Slo
    share: float = 0.95
    requests: int = LEAST
    seconds: float | None = None
    warmup: int | None = None
    most: int = level_search.MOST
    arrivals: Arrivals = "poisson"
    burstiness: float = 4.0


@dataclass(frozen=True, slots=True)
class Point:
    """One measurement of one level; `excess` as Seen has it."""

    level: float
    excess: float
    figures: Figures

    @property
    def held(self) -> bool:
        """Whether this one kept the promise."""
        return self.excess <= 0


@dataclass(frozen=True, slots=True)
class Edge:
    """The largest level that holds (None: not even the least), the next one that was tried (None:
    nothing more was), and all that was measured.

    The edge lies between `low` and `high` (90 %; None: not within the grid), and two searches agree
    where their levels are no more than `steps` of the grid apart. `best`: the level's figures, all
    its measurements pooled. `alone`: the seconds that one user alone waited for a whole answer, in
    the order of time.
    """

    kind: Kind
    level: float | None
    above: float | None
    low: float | None
    high: float | None
    steps: int
    points: tuple[Point, ...]
    best: Figures | None
    alone: tuple[float, ...]

    @property
    def drift(self) -> float | None:
        """How many times as long as at its fastest one user alone waited at the slowest; None:
        within noise.
        """
        if len(self.alone) < 2 or min(self.alone) <= 0:
            return None
        ratio = max(self.alone) / min(self.alone)
        return (
            ratio if ratio > DRIFTED and max(self.alone) - min(self.alone) > SECONDS_OFF else None
        )


@dataclass(slots=True)
class _Search:
    """One search on one server; `runs` are those of each place."""

    session: Session
    kind: Kind
    rules: Rules
    levels: Sequence[float]
    number: int
    tick: Callable[[str], None]
    seen: list[Seen] = field(default_factory=list)
    points: list[Point] = field(default_factory=list)
    runs: dict[int, list[Run]] = field(default_factory=dict)
    alone: list[float] = field(default_factory=list)

    async def edge(self, first: float | None) -> Edge:
        one = await self.user()
        wanted = first or (1.0 if self.kind == "concurrency" else one.request_rate)
        start = level_search.nearest(self.levels, wanted)
        while (
            at := level_search.following(self.levels, start, self.seen, self.rules.most)
        ) is not None:
            await self.measure(at)
            if len(self.seen) % AGAIN == 0:
                await self.user()
        await self.user()
        return self.told(level_search.found(self.levels, self.seen))

    async def user(self) -> Figures:
        """One user alone."""
        self.tick("one alone")
        run = await self.session.run(Load("closed", 1), ALONE, self.number + 500 + len(self.alone))
        one = figures([run])
        if "e2el" in one.times:
            self.alone.append((one.times["e2el"].ranks["p50"] or 0.0) / 1e3)
        return one

    async def measure(self, at: int) -> None:
        level, rules = self.levels[at], self.rules
        load = (
            Load("closed", level)
            if self.kind == "concurrency"
            else Load(rules.arrivals, level, rules.burstiness)
        )
        self.tick(load.name)
        seconds = rules.seconds if load.closed else rules.seconds or SECONDS
        count = max(
            rules.requests, math.ceil(level * ROUNDS if load.closed else level * (seconds or 0.0))
        )
        watch = _Watch(rules, load, count)
        length = Length(count, seconds if load.closed else None, self.warmup(level, load.closed))
        run = await self.session.run(
            load, length, self.number + len(self.points), enough=watch, may_fail=True
        )
        excess = watch.excess(run)
        self.seen.append(Seen(at, excess))
        self.points.append(Point(level, excess, figures([run], rules.slo)))
        self.runs.setdefault(at, []).append(run)

    def warmup(self, level: float, closed: bool) -> int | None:
        """Requests until an open loop has filled the server: those of three answers' time, at least
        two seconds.
        """
        if self.rules.warmup is not None or closed:
            return self.rules.warmup
        return math.ceil(level * min(SECONDS, max(2.0, 3 * max(self.alone, default=0.0))))

    def told(self, found: level_search.Found) -> Edge:
        levels, at = self.levels, found.at
        runs = self.runs.get(at, [])
        above = min(
            (place for place in self.runs if place > at), default=None
        )  # None: measurements ran out, or levels
        within = at >= 0 and above is not None
        return Edge(
            self.kind,
            levels[at] if at >= 0 else None,
            None if above is None else levels[above],
            level_search.between(levels, found.low) if within else None,
            level_search.between(levels, found.high) if within else None,
            found.steps,
            tuple(self.points),
            figures(runs, self.rules.slo) if runs else None,
            tuple(self.alone),
        )


@dataclass(slots=True)
class _Watch:
    """Says of a run, answer by answer, whether it is clear what it will come to; `clear` is that."""

    rules: Rules
    load: Load
    count: int
    clear: float | None = None
    done: int = 0
    half: int = 0  # of them below half of the promise
    lost: int = 0  # beyond twice the promise
    look: int = 10  # answers after which is looked whether a queue grows

    @property
    def allowed(self) -> int:
        return math.floor((1 - self.rules.share) * self.count + 1e-9)

    def __call__(self, run: Run, answer: Answer) -> bool:
        if answer.cancelled:
            return False
        ratio = self.rules.slo.ratio(answer)
        self.done += 1
        self.half += ratio <= 0.5
        self.lost += ratio >= 2
        if self.lost > self.allowed:
            self.clear = CLIP
        elif self.load.closed and self.half == self.done >= max(CLEAR, ROUNDS * self.load.level):
            self.clear = -CLIP
        elif self.done >= self.look and answer.scheduled - run.began > FILLING:
            self.look = math.ceil(1.2 * self.done)  # looking takes time, too
            if run.saturated:
                self.clear = CLIP
        return self.clear is not None

    def excess(self, run: Run) -> float:
        """The logarithm of what `share` of the requests did not exceed, in units of the promise."""
        if self.clear is not None:
            return self.clear
        if run.stopped or run.saturated:
            return CLIP
        met = sorted(
            self.rules.slo.ratio(one)
            for one in run.measured
            if one.ended is not None and not one.cancelled
        )
        if not met:
            return CLIP  # nobody stayed to be answered
        return math.log(max(1e-9, met[max(0, math.ceil(self.rules.share * len(met) - 1e-9) - 1)]))


async def find(
    session: Session,
    kind: Kind,
    rules: Rules,
    first: float | None,
    number: int,
    tick: Callable[[str], None],
) -> Edge:
    """Search from a level near `first` (None: one user, or the rate of one user alone); prompts
    have numbers from `number` on. `tick` is told what is measured.
    """
    levels = level_search.users() if kind == "concurrency" else level_search.rates()
    return await _Search(session, kind, rules, levels, number, tick).edge(first)
