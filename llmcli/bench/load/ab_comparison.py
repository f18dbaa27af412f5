"""Comparison of two servers under the same load, as ratios with confidence intervals.

Servers on the same machine would disturb each other, so only one server is measured at a time. In
each turn, both servers receive the same prompts, one server after the other in random order.
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
    """The metrics of servers A and B over all turns of one load, and the ratios B / A. Tokens per
    second are better if higher; times are better if lower.
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
    """Measure both servers in `turns` turns, and compare them. Both servers get the same prompts
    within a turn, and each turn has new prompts. `number` selects the prompts of the first turn.
    `tick` is called after each run.
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
    """Compare servers A and B; `a[i]` and `b[i]` are their runs in turn i. `slo`: the latency
    limits for the goodput; None: no limits.
    """
    metrics_a, metrics_b = compute_metrics(a, slo), compute_metrics(b, slo)
    ratios = [_compare_output_rates(metrics_a, metrics_b)]
    for name in TIME_METRICS:
        if name in metrics_a.times and name in metrics_b.times:
            ranks = metrics_a.times[name].percentiles, metrics_b.times[name].percentiles
            ratios += [
                _compare_percentile(name, rank, a, b)
                for rank in ("p50", "p99")
                if None not in (percentiles[rank] for percentiles in ranks)
            ]
    # a metric of server A that is zero has no ratio
    finite = [ratio for ratio in ratios if ratio.a > 0]
    return ServerComparison(metrics_a, metrics_b, tuple(finite), len(a))


def _compare_output_rates(metrics_a: LoadMetrics, metrics_b: LoadMetrics) -> MetricRatio:
    """Return the ratio of the output tokens per second. Its interval comes from the signed-rank
    test on the pairs of runs.
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


def _compare_percentile(
    name: str, rank: str, a: Sequence[LoadRun], b: Sequence[LoadRun]
) -> MetricRatio:
    """Return the ratio of one percentile of a latency metric, such as the p99 of "ttft". The
    percentile is taken over all requests of a server. The interval comes from a bootstrap that
    draws complete turns.
    """
    share = PERCENTILES[rank][0]
    times = [
        [
            np.asarray(
                metric_seconds(
                    name, [answer for answer in run.measured_answers if answer.is_complete]
                )
            )
            for run in side
        ]
        for side in (a, b)
    ]

    def percentile_of_turns(turns: Sequence[int]) -> tuple[float, float]:
        value_a, value_b = (
            _nearest_rank(np.concatenate([side[turn] for turn in turns]), share) for side in times
        )
        return value_a, value_b

    value_a, value_b = percentile_of_turns(range(len(a)))
    rng, ratios = random.Random(0), []
    if len(a) >= 6 and value_a > 0:
        for _ in range(BOOTSTRAP_DRAWS):
            resampled_a, resampled_b = percentile_of_turns(rng.choices(range(len(a)), k=len(a)))
            ratios.append(resampled_b / resampled_a if resampled_a else np.inf)
    tail = (1 - CONFIDENCE) / 2
    span = (
        (percentile(ratios, round(tail, 3)), percentile(ratios, round(1 - tail, 3)))
        if ratios
        else (None, None)
    )
    return MetricRatio(
        f"{name} {rank}", value_a * 1e3, value_b * 1e3, value_b / value_a if value_a else 0.0, *span
    )


def _nearest_rank(values: NDArray[np.float64], share: float) -> float:
    """Return the nearest-rank percentile of an array of shape `[n]`; 0 if it is empty. `share`: the
    rank as a fraction, 0.5 for the median.
    """
    at = max(0, -(-len(values) * round(share * 1000) // 1000) - 1)
    return float(np.partition(values, at)[at]) if len(values) else 0.0
