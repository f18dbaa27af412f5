"""Measurements for the search for the largest load at which a server keeps its latency limits.

The measurement of a level ends early if the latencies are clearly above twice the limits. In a
closed loop, it also ends early if they are clearly below half of the limits. The estimate clips all
values to this range, so a longer measurement would not change it.

A single user is measured at the beginning, every SINGLE_USER_INTERVAL measurements, and at the end.
If this user's waiting time changes, the speed of the machine has changed.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from llmcli.bench.load import level_search
from llmcli.bench.load.generator import Arrivals, Load, LoadLength, LoadRun
from llmcli.bench.load.metrics import LoadMetrics, compute_metrics
from llmcli.bench.load.records import LoadAnswer
from llmcli.bench.load.session import ServerSession
from llmcli.bench.load.slo import Slo
from llmcli.bench.load.threshold_fit import MAX_EXCESS, Observation

LoadKind = Literal["concurrency", "rate"]
MIN_REQUESTS = 40  # minimum number of requests in the measurement of a level
REQUESTS_PER_USER = 2  # in a closed loop, each user sends at least this many requests on average
OPEN_LOOP_SECONDS = 20.0  # seconds of a measurement in an open loop
# In the first seconds the queue grows on any server, because it starts empty.
FILLING_SECONDS = 10.0
# minimum number of answers, all below half of the limits, to end the measurement of a level early
MIN_CLEAR_ANSWERS = 10
SINGLE_USER_LENGTH = LoadLength(6, warmup=3)
SINGLE_USER_INTERVAL = 10
# The waiting times of a single user count as drift if the longest exceeds the shortest by more than
# this ratio and by more than these seconds.
MIN_DRIFT_RATIO, MIN_DRIFT_SECONDS = 1.1, 0.02


@dataclass(frozen=True, slots=True)
class MaxLoadSettings:
    """The condition under which a level holds, and how levels are measured.

    A level holds if `required_share` of its requests are within the limits of `slo` and the queue
    of requests does not grow. Each measurement has at least `requests` requests and takes at least
    `seconds`. Its first `warmup` requests do not count (None: see LoadLength). The search ends
    after `max_measurements`. `arrivals` and `burstiness` describe the open loop (see Load).
    """

    slo: Slo
    required_share: float = 0.95
    requests: int = MIN_REQUESTS
    seconds: float | None = None
    warmup: int | None = None
    max_measurements: int = level_search.MAX_MEASUREMENTS
    arrivals: Arrivals = "poisson"
    burstiness: float = 4.0


@dataclass(frozen=True, slots=True)
class LevelMeasurement:
    """One measurement of one level. `excess`: natural logarithm of the measured latency divided by
    its limit (see `Observation`).
    """

    level: float
    excess: float
    metrics: LoadMetrics

    @property
    def keeps_limits(self) -> bool:
        """Whether the server kept the latency limits in this measurement."""
        return self.excess <= 0


@dataclass(frozen=True, slots=True)
class MaxLoadResult:
    """The result of a search for the largest load.

    `level`: the largest level that holds; None if the lowest level does not hold. `next_level`: the
    lowest measured level above `level`; None if there is none. `low`, `high`: 90 % confidence
    interval of the largest load; None if `level` or `next_level` is None. `steps`: the largest
    distance, in steps of the grid, at which another search still agrees with this one.
    `best_metrics`: the metrics of `level`, over all its measurements. `single_user_seconds`: for
    each measurement of a single user, in order of time, the median seconds until an answer is
    complete.
    """

    kind: LoadKind
    level: float | None
    next_level: float | None
    low: float | None
    high: float | None
    steps: int
    measurements: tuple[LevelMeasurement, ...]
    best_metrics: LoadMetrics | None
    single_user_seconds: tuple[float, ...]

    @property
    def drift(self) -> float | None:
        """The ratio of a single user's longest to shortest waiting time; None if the difference is
        too small to count as drift.
        """
        if len(self.single_user_seconds) < 2 or min(self.single_user_seconds) <= 0:
            return None
        shortest, longest = min(self.single_user_seconds), max(self.single_user_seconds)
        is_drift = longest / shortest > MIN_DRIFT_RATIO and longest - shortest > MIN_DRIFT_SECONDS
        return longest / shortest if is_drift else None


@dataclass(slots=True)
class _MaxLoadSearch:
    """One search on one server.

    `number`: number of the first prompt sequence. `observations`, `measurements`: the results so
    far, in order of time. `runs`: the runs of each level, by level index. `single_user_seconds`:
    for each measurement of a single user, the median seconds until an answer is complete.
    """

    session: ServerSession
    kind: LoadKind
    settings: MaxLoadSettings
    levels: Sequence[float]
    number: int
    tick: Callable[[str], None]
    observations: list[Observation] = field(default_factory=list)
    measurements: list[LevelMeasurement] = field(default_factory=list)
    runs: dict[int, list[LoadRun]] = field(default_factory=dict)
    single_user_seconds: list[float] = field(default_factory=list)

    async def search(self, first_level: float | None) -> MaxLoadResult:
        single_user = await self.measure_single_user()
        if not first_level:
            first_level = 1.0 if self.kind == "concurrency" else single_user.request_rate
        start = level_search.nearest_index(self.levels, first_level)
        while (
            index := level_search.choose_next_level(
                self.levels, start, self.observations, self.settings.max_measurements
            )
        ) is not None:
            await self.measure_level(index)
            if len(self.observations) % SINGLE_USER_INTERVAL == 0:
                await self.measure_single_user()
        await self.measure_single_user()
        return self.build_result(level_search.estimate_edge(self.levels, self.observations))

    async def measure_single_user(self) -> LoadMetrics:
        """Measure the load of a single user, append to `single_user_seconds`, and return the
        metrics.
        """
        self.tick("single user")
        run = await self.session.run_load(
            Load("closed", 1), SINGLE_USER_LENGTH, self.number + 500 + len(self.single_user_seconds)
        )
        metrics = compute_metrics([run])
        if "e2el" in metrics.times:
            self.single_user_seconds.append((metrics.times["e2el"].percentiles["p50"] or 0.0) / 1e3)
        return metrics

    async def measure_level(self, index: int) -> None:
        level, settings = self.levels[index], self.settings
        load = (
            Load("closed", level)
            if self.kind == "concurrency"
            else Load(settings.arrivals, level, settings.burstiness)
        )
        self.tick(load.name)
        seconds = settings.seconds if load.is_closed else settings.seconds or OPEN_LOOP_SECONDS
        count = max(
            settings.requests,
            math.ceil(level * REQUESTS_PER_USER if load.is_closed else level * (seconds or 0.0)),
        )
        stop_check = _LevelStopCheck(settings, load, count)
        length = LoadLength(
            count, seconds if load.is_closed else None, self.warmup(level, load.is_closed)
        )
        run = await self.session.run_load(
            load,
            length,
            self.number + len(self.measurements),
            should_stop=stop_check,
            may_fail=True,
        )
        excess = stop_check.excess(run)
        self.observations.append(Observation(index, excess))
        self.measurements.append(
            LevelMeasurement(level, excess, compute_metrics([run], settings.slo))
        )
        self.runs.setdefault(index, []).append(run)

    def warmup(self, level: float, closed: bool) -> int | None:
        """Return the number of first requests of a measurement that do not count; None: the default
        of LoadLength. In an open loop, these are the requests that arrive until the queue of the
        server has filled: during three times the duration of an answer, at least two seconds.
        """
        if self.settings.warmup is not None or closed:
            return self.settings.warmup
        return math.ceil(
            level * min(OPEN_LOOP_SECONDS, max(2.0, 3 * max(self.single_user_seconds, default=0.0)))
        )

    def build_result(self, estimate: level_search.LoadEstimate) -> MaxLoadResult:
        levels, largest = self.levels, estimate.level_index
        runs = self.runs.get(largest, [])
        # None if the search ended before it measured a higher level
        next_index = min((index for index in self.runs if index > largest), default=None)
        within = largest >= 0 and next_index is not None
        return MaxLoadResult(
            kind=self.kind,
            level=levels[largest] if largest >= 0 else None,
            next_level=None if next_index is None else levels[next_index],
            low=level_search.level_at(levels, estimate.low) if within else None,
            high=level_search.level_at(levels, estimate.high) if within else None,
            steps=estimate.steps,
            measurements=tuple(self.measurements),
            best_metrics=compute_metrics(runs, self.settings.slo) if runs else None,
            single_user_seconds=tuple(self.single_user_seconds),
        )


@dataclass(slots=True)
class _LevelStopCheck:
    """Decides after each answer whether the result of a level is already clear, so that its
    measurement can end early. An instance is called like a function (see `StopCheck`).

    `count`: number of requests that count. `clear_excess`: the excess of the level (see
    `Observation`) once it is clear, until then None. `n_done`: number of answers so far.
    `n_below_half`, `n_above_twice`: how many of these answers took at most half of the limits, or
    at least twice the limits. `next_check`: the number of answers after which the growth of the
    queue is checked again.
    """

    settings: MaxLoadSettings
    load: Load
    count: int
    clear_excess: float | None = None
    n_done: int = 0
    n_below_half: int = 0
    n_above_twice: int = 0
    next_check: int = 10

    @property
    def allowed_misses(self) -> int:
        """The number of requests that may exceed the limits while the level still holds."""
        return math.floor((1 - self.settings.required_share) * self.count + 1e-9)

    def __call__(self, run: LoadRun, answer: LoadAnswer) -> bool:
        if answer.cancelled:
            return False
        ratio = self.settings.slo.worst_ratio(answer)
        self.n_done += 1
        self.n_below_half += ratio <= 0.5
        self.n_above_twice += ratio >= 2
        if self.n_above_twice > self.allowed_misses:
            self.clear_excess = MAX_EXCESS
        elif self.load.is_closed and self.n_below_half == self.n_done >= max(
            MIN_CLEAR_ANSWERS, REQUESTS_PER_USER * self.load.level
        ):
            self.clear_excess = -MAX_EXCESS
        elif self.n_done >= self.next_check and answer.scheduled - run.began > FILLING_SECONDS:
            # check seldom, because the check takes time
            self.next_check = math.ceil(1.2 * self.n_done)
            if run.is_saturated:
                self.clear_excess = MAX_EXCESS
        return self.clear_excess is not None

    def excess(self, run: LoadRun) -> float:
        """Return the excess of a finished run (see `Observation`). For each request, take the
        largest ratio of a measured time to its limit. The result is the logarithm of the ratio that
        `required_share` of the requests do not exceed.
        """
        if self.clear_excess is not None:
            return self.clear_excess
        if run.was_stopped or run.is_saturated:
            return MAX_EXCESS
        ratios = sorted(
            self.settings.slo.worst_ratio(answer)
            for answer in run.measured_answers
            if answer.ended is not None and not answer.cancelled
        )
        if not ratios:
            return MAX_EXCESS  # all requests were canceled
        return math.log(
            max(
                1e-9,
                ratios[max(0, math.ceil(self.settings.required_share * len(ratios) - 1e-9) - 1)],
            )
        )


async def find_max_load(
    session: ServerSession,
    kind: LoadKind,
    settings: MaxLoadSettings,
    first: float | None,
    number: int,
    tick: Callable[[str], None],
) -> MaxLoadResult:
    """Search for the largest load at which the server keeps its latency limits.

    `first`: the level to start near; None: one user, or the request rate that a single user
    reaches. `number`: number of the first prompt sequence. `tick` is called with the name of each
    measurement before it starts.
    """
    levels = level_search.user_levels() if kind == "concurrency" else level_search.rate_levels()
    return await _MaxLoadSearch(session, kind, settings, levels, number, tick).search(first)
