"""Comparison of two servers under the same load, as ratios with confidence intervals.

Servers that share a machine would disturb each other, so they are never measured at the same time.
They take turns: in each turn both servers get the same prompts, one server after the other, and
chance decides which is first.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from llmcli.bench.load.generator import Load, LoadLength, LoadRun
from llmcli.bench.load.metrics import (
    PERCENTILES,
    TIME_METRICS,
    LoadMetrics,
    compute_metrics,
    metric_seconds,
)
from llmcli.bench.load.session import ServerSession
from llmcli.bench.load.slo import Slo
from llmcli.bench.statistics import paired_test
from llmcli.bench.statistics.paired_test import Comparison, Design
from llmcli.runtime.requests.request import percentile

BOOTSTRAP_DRAWS = 1000  # resamplings for one interval
CONFIDENCE = 0.95
DEFAULT_TURNS = 8  # turns of each server; an interval with CONFIDENCE needs at least 6


@dataclass(frozen=True, slots=True)
class MetricRatio:
    """One metric of servers A and B, and the ratio B / A with its confidence interval. `low` and
    `high` are None if there are too few turns for an interval.
    """

    name: str
    a: float
    b: float
    ratio: float
    low: float | None
    high: float | None


@dataclass(frozen=True, slots=True)
class ServerComparison:
    """The metrics of two servers under one load, each over all turns, and the ratios of these
    metrics. Higher is better for tokens per second, lower is better for times.
    """

    a: LoadMetrics
    b: LoadMetrics
    ratios: tuple[MetricRatio, ...]
    turns: int


async def compare_servers(
    sessions: tuple[ServerSession, ServerSession],
    load: Load,
    length: LoadLength,
    turns: int,
    slo: Slo | None,
    number: int,
    tick: Callable[[], None],
) -> ServerComparison:
    """Measure both servers in `turns` turns, and compare them. Both servers of a turn get the same
    prompts; each turn has new ones. `number` selects the prompts of the first turn.
    """
    coin = random.Random(number)
    runs: tuple[list[LoadRun], list[LoadRun]] = ([], [])
    for turn in range(turns):
        for index in (0, 1) if coin.random() < 0.5 else (1, 0):
            runs[index].append(await sessions[index].run_load(load, length, number + turn))
            tick()
    return compare_runs(runs[0], runs[1], slo)


def compare_runs(
    a: Sequence[LoadRun], b: Sequence[LoadRun], slo: Slo | None = None
) -> ServerComparison:
    """Compare two servers; `a[i]` and `b[i]` are their runs in turn i."""
    metrics_a, metrics_b = compute_metrics(a, slo), compute_metrics(b, slo)
    ratios = [_rate(metrics_a, metrics_b)]
    for name in TIME_METRICS:
        if name in metrics_a.times and name in metrics_b.times:
            ranks = metrics_a.times[name].percentiles, metrics_b.times[name].percentiles
            ratios += [
                _time(name, rank, a, b)
                for rank in ("p50", "p99")
                if None not in (percentiles[rank] for percentiles in ranks)
            ]
    # a metric of server A that is zero has no ratio
    finite = [ratio for ratio in ratios if ratio.a > 0]
    return ServerComparison(metrics_a, metrics_b, tuple(finite), len(a))


def _rate(metrics_a: LoadMetrics, metrics_b: LoadMetrics) -> MetricRatio:
    """Return the ratio of output tokens per second. Its interval comes from the signed-rank test on
    the pairs of runs.
    """
    comparison = paired_test.estimate_ratio(
        metrics_a.repetition_rates,
        metrics_b.repetition_rates,
        Design(confidence=CONFIDENCE, allowance=0.0),
    )
    assert isinstance(comparison, Comparison)
    has_interval = comparison.low > 0 and comparison.high < np.inf
    return MetricRatio(
        "output tok/s",
        metrics_a.output_rate,
        metrics_b.output_rate,
        comparison.ratio,
        comparison.low if has_interval else None,
        comparison.high if has_interval else None,
    )


def _time(name: str, rank: str, a: Sequence[LoadRun], b: Sequence[LoadRun]) -> MetricRatio:
    """Return the ratio of a percentile, such as the p99 of "ttft", over all requests of each
    server. Its interval comes from a bootstrap that draws whole turns.
    """
    share = PERCENTILES[rank][0]
    times = [
        [
            np.asarray(
                metric_seconds(
                    name, [value_a for value_a in run.measured_answers if value_a.is_complete]
                )
            )
            for run in side
        ]
        for side in (a, b)
    ]

    def at(turns: Sequence[int]) -> tuple[float, float]:
        value_a, value_b = (
            _ranked(np.concatenate([side[turn] for turn in turns]), share) for side in times
        )
        return value_a, value_b

    value_a, value_b = at(range(len(a)))
    rng, ratios = random.Random(0), []
    if len(a) >= 6 and value_a > 0:
        for _ in range(BOOTSTRAP_DRAWS):
            low, high = at(rng.choices(range(len(a)), k=len(a)))
            ratios.append(high / low if low else np.inf)
    tail = (1 - CONFIDENCE) / 2
    span = (
        (percentile(ratios, round(tail, 3)), percentile(ratios, round(1 - tail, 3)))
        if ratios
        else (None, None)
    )
    return MetricRatio(
        f"{name} {rank}", value_a * 1e3, value_b * 1e3, value_b / value_a if value_a else 0.0, *span
    )


def _ranked(values: NDArray[np.float64], share: float) -> float:
    """Return the nearest-rank percentile of an array; `share` 0.5 is the median. Shape: values
    `[n]`.
    """
    at = max(0, -(-len(values) * round(share * 1000) // 1000) - 1)
    return float(np.partition(values, at)[at]) if len(values) else 0.0
