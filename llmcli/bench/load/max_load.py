"""Search for the largest load at which a server keeps its latency limits.

The measurement of a level ends early when it is clearly above twice the limits or, in a closed
loop, below half of them, since the fit treats both alike. A single user is measured at the
beginning, every AGAIN measurements and at the end, to detect changes of the machine.
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
FILLING = 10.0  # seconds after which a growing queue is no longer just the server filling up
CLEAR = 10  # minimum number of answers, all below half of the limits, to end a level early
ALONE = Length(6, warmup=3)
AGAIN = 10
# minimum ratio, and minimum difference in seconds, between waiting times of a single user that
# count as drift
DRIFTED, SECONDS_OFF = 1.1, 0.02


@dataclass(frozen=True, slots=True)
class Rules:
    """When a level holds, and how levels are measured.

    A level holds if `share` of its requests are within `slo` and no queue grows. A level has at
    least `requests` requests and takes at least `seconds`; its first `warmup` requests do not count
    (None: see LoadLength). `max_measurements`: limit of the search. `arrivals` and `burstiness`: of
    the open loop.
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
    """One measurement of one level. `excess`: see `Observation`."""

    level: float
    excess: float
    figures: Figures

    @property
    def held(self) -> bool:
        """Whether this measurement kept the limits."""
        return self.excess <= 0


@dataclass(frozen=True, slots=True)
class Edge:
    """The result of a search for the largest load.

    `level`: the largest level that holds, None: not even the lowest. `next_level`: the next
    measured level, None: no higher one was measured. The largest load lies between `low` and `high`
    (90 % confidence; None: not within the grid). Two searches agree if their levels are at most
    `steps` of the grid apart. `best`: the metrics of `level`, over all its measurements.
    `single_user_seconds`: how long a single user waited for a complete answer, in order of time.
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
        """The ratio of the longest to the shortest waiting time of a single user; None if they do
        not differ significantly.
        """
        if len(self.alone) < 2 or min(self.alone) <= 0:
            return None
        ratio = max(self.alone) / min(self.alone)
        return (
            ratio if ratio > DRIFTED and max(self.alone) - min(self.alone) > SECONDS_OFF else None
        )


@dataclass(slots=True)
class _Search:
    """One search on one server. `runs`: by level index."""

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
        single_user = await self.user()
        first_level = first or (1.0 if self.kind == "concurrency" else single_user.request_rate)
        start = level_search.nearest(self.levels, first_level)
        while (
            index := level_search.following(self.levels, start, self.seen, self.rules.most)
        ) is not None:
            await self.measure(index)
            if len(self.seen) % AGAIN == 0:
                await self.user()
        await self.user()
        return self.told(level_search.found(self.levels, self.seen))

    async def user(self) -> Figures:
        """Measure a single user."""
        self.tick("one alone")
        run = await self.session.run(Load("closed", 1), ALONE, self.number + 500 + len(self.alone))
        metrics = figures([run])
        if "e2el" in metrics.times:
            self.alone.append((metrics.times["e2el"].ranks["p50"] or 0.0) / 1e3)
        return metrics

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
        """Return the number of requests until an open loop has filled the server: three times the
        duration of an answer, at least two seconds.
        """
        if self.rules.warmup is not None or closed:
            return self.rules.warmup
        return math.ceil(level * min(SECONDS, max(2.0, 3 * max(self.alone, default=0.0))))

    def told(self, estimate: level_search.Found) -> Edge:
        levels, largest = self.levels, estimate.at
        runs = self.runs.get(largest, [])
        # None: the measurements or the levels ran out
        above = min((index for index in self.runs if index > largest), default=None)
        within = largest >= 0 and above is not None
        return Edge(
            self.kind,
            levels[largest] if largest >= 0 else None,
            None if above is None else levels[above],
            level_search.between(levels, estimate.low) if within else None,
            level_search.between(levels, estimate.high) if within else None,
            estimate.steps,
            tuple(self.points),
            figures(runs, self.rules.slo) if runs else None,
            tuple(self.alone),
        )


@dataclass(slots=True)
class _Watch:
    """Decides after every answer whether the result of a level is already clear. `clear`: that
    result, as an excess.
    """

    rules: Rules
    load: Load
    count: int
    clear: float | None = None
    done: int = 0
    half: int = 0  # answers below half of the limits
    lost: int = 0  # answers above twice the limits
    look: int = 10  # number of answers at the next check for a growing queue

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
            self.look = math.ceil(1.2 * self.done)  # the check takes time, too
            if run.saturated:
                self.clear = CLIP
        return self.clear is not None

    def excess(self, run: Run) -> float:
        """Return the excess of the run: the logarithm of the ratio to the limits that `share` of
        its requests did not exceed.
        """
        if self.clear is not None:
            return self.clear
        if run.stopped or run.saturated:
            return CLIP
        ratios = sorted(
            self.rules.slo.ratio(answer)
            for answer in run.measured
            if answer.ended is not None and not answer.cancelled
        )
        if not ratios:
            return CLIP  # all requests were canceled
        return math.log(
            max(1e-9, ratios[max(0, math.ceil(self.rules.share * len(ratios) - 1e-9) - 1)])
        )


async def find(
    session: Session,
    kind: Kind,
    rules: Rules,
    first: float | None,
    number: int,
    tick: Callable[[str], None],
) -> Edge:
    """Search from a level near `first` (None: one user, or the request rate of a single user).

    `number`: number of the first prompt sequence. `tick` receives the name of each measurement.
    """
    levels = level_search.users() if kind == "concurrency" else level_search.rates()
    return await _Search(session, kind, rules, levels, number, tick).edge(first)
