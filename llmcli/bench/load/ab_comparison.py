"""Comparison of two servers: the same prompts in alternating turns in random order, and ratios with
confidence intervals.

Servers that share a machine are never measured at the same time, because they would disturb each
other.
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

BOOTSTRAP_DRAWS = 1000  # of the bootstrap
CONFIDENCE = 0.95
DEFAULT_TURNS = 8  # turns of each server; at least 6 are needed for an interval with CONFIDENCE


@dataclass(frozen=True, slots=True)
class MetricRatio:
    """B relative to A, with its interval; None: too few turns for an interval."""

    name: str
    a: float
    b: float
    ratio: float
    low: float | None
    high: float | None


@dataclass(frozen=True, slots=True)
class ServerComparison:
    """The metrics of both servers under one load over all turns, and their ratios. Higher is better
    for tok/s, lower for times.
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
    """Measure `turns` turns of each server; both servers of a turn get the same new prompts."""
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
    """Return the comparison of pairs of runs."""
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
    # a ratio to a time of zero does not exist
    finite = [ratio for ratio in ratios if ratio.a > 0]
    return ServerComparison(metrics_a, metrics_b, tuple(finite), len(a))


def _rate(metrics_a: LoadMetrics, metrics_b: LoadMetrics) -> MetricRatio:
    """Return the ratio of output tokens per second, with the signed-rank interval of the pairs."""
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
    """Return the ratio of a percentile over all requests of each server. Its interval is a
    bootstrap over turns, in pairs.
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
    """Return the nearest-rank percentile of an array. Shape: values `[n]`."""
    at = max(0, -(-len(values) * round(share * 1000) // 1000) - 1)
    return float(np.partition(values, at)[at]) if len(values) else 0.0
