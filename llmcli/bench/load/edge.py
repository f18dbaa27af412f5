"""The largest load on a server within a promise: search.py's levels, measured one after the other."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from llmcli.bench.load import search
from llmcli.bench.load.drive import Arrivals, Length, Load, Run
from llmcli.bench.load.figures import Figures, figures
from llmcli.bench.load.session import Session
from llmcli.bench.load.slo import Slo

Kind = Literal["concurrency", "rate"]
LEAST = 40  # requests of a level
ROUNDS = 2  # requests of each user
SECONDS = 20.0  # of an open loop
FILLING = 10.0  # of them before a queue that grows is more than a server that fills


@dataclass(frozen=True, slots=True)
class Rules:
    """When a level holds: `share` of its requests keep the promise, and no queue grows. `requests`: of a level, at
    least. `arrivals` are those of the open loop."""

    slo: Slo
    share: float = 0.95
    requests: int = LEAST
    votes: int = search.VOTES
    arrivals: Arrivals = "poisson"
    burstiness: float = 4.0


@dataclass(frozen=True, slots=True)
class Point:
    """One measurement of one level."""

    level: float
    held: bool
    figures: Figures


@dataclass(frozen=True, slots=True)
class Edge:
    """The largest level that holds (None: not even the least), the next one of the grid, and all that was measured."""

    kind: Kind
    level: float | None
    above: float | None
    points: tuple[Point, ...]

    @property
    def best(self) -> Figures | None:
        """The figures of the level, those of its last measurement that held."""
        found = [one.figures for one in self.points if one.level == self.level and one.held]
        return found[-1] if found else None


async def find(
    session: Session, kind: Kind, rules: Rules, first: float, number: int, tick: Callable[[str], None]
) -> Edge:
    """Search from a level near `first`; prompts have numbers from `number` on. `tick` is told what is measured."""
    levels = search.users() if kind == "concurrency" else search.rates()
    points: list[Point] = []
    looking = search.largest(levels, search.nearest(levels, first), rules.votes)
    level = next(looking)
    while True:
        tick(_load(kind, level, rules).name)
        points.append(await _measured(session, kind, level, rules, number + len(points)))
        try:
            level = looking.send(points[-1].held)
        except StopIteration as found:
            return Edge(kind, found.value, _above(levels, found.value), tuple(points))


async def _measured(session: Session, kind: Kind, level: float, rules: Rules, number: int) -> Point:
    load = _load(kind, level, rules)
    count = max(rules.requests, math.ceil(level * (ROUNDS if load.closed else SECONDS)))
    allowed = math.floor((1 - rules.share) * count + 1e-9)

    def lost(run: Run) -> bool:
        """Whether the level cannot hold any more, whatever comes."""
        done = [one for one in run.measured if one.ended is not None and not one.cancelled]
        broken = sum(not rules.slo.keeps(one) for one in done)
        late = bool(done) and done[-1].scheduled - run.began > FILLING
        return broken > allowed or (late and len(done) % 10 == 0 and run.saturated)

    run = await session.run(load, Length(count), number, enough=lost)
    told = figures([run], rules.slo)
    held = not (told.stopped or told.saturated) and (told.share or 0.0) >= rules.share - 1e-9
    return Point(level, held, told)


def _load(kind: Kind, level: float, rules: Rules) -> Load:
    return Load("closed", level) if kind == "concurrency" else Load(rules.arrivals, level, rules.burstiness)


def _above(levels: Sequence[float], level: float | None) -> float | None:
    at = -1 if level is None else levels.index(level)
    return levels[at + 1] if at + 1 < len(levels) else None
