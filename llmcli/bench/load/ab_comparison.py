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

from llmcli.bench.load.generator import Length, Load, Run
from llmcli.bench.load.metrics import RANKS, TIMES, Figures, figures, seconds_of
from llmcli.bench.load.session import Session
from llmcli.bench.load.slo import Slo
from llmcli.bench.statistics import paired_test
from llmcli.bench.statistics.paired_test import Comparison, Design
from llmcli.runtime.requests.request import percentile

DRAWS = 1000  # of the bootstrap
CONFIDENCE = 0.95
TURNS = 8  # turns of each server; at least 6 are needed for an interval with CONFIDENCE


@dataclass(frozen=True, slots=True)
class Ratio:
    """B relative to A, with its interval; None: too few turns for an interval."""

    name: str
    a: float
    b: float
    ratio: float
    low: float | None
    high: float | None


@dataclass(frozen=True, slots=True)
class Versus:
    """The metrics of both servers under one load over all turns, and their ratios. Higher is better
    for tok/s, lower for times.
    """

    a: Figures
    b: Figures
    ratios: tuple[Ratio, ...]
    turns: int


async def versus(
    sides: tuple[Session, Session],
    load: Load,
    length: Length,
    turns: int,
    slo: Slo | None,
    number: int,
    tick: Callable[[], None],
) -> Versus:
    """Measure `turns` turns of each server; both servers of a turn get the same new prompts."""
    coin, runs = random.Random(number), ([], [])  # type: tuple[random.Random, tuple[list[Run], list[Run]]]
    for turn in range(turns):
        for index in (0, 1) if coin.random() < 0.5 else (1, 0):
            runs[index].append(await sides[index].run(load, length, number + turn))
            tick()
    return compared(runs[0], runs[1], slo)


def compared(a: Sequence[Run], b: Sequence[Run], slo: Slo | None = None) -> Versus:
    """Return the comparison of pairs of runs."""
    metrics_a, metrics_b = figures(a, slo), figures(b, slo)
    ratios = [_rate(metrics_a, metrics_b)]
    for name in TIMES:
        if name in metrics_a.times and name in metrics_b.times:
            ranks = metrics_a.times[name].ranks, metrics_b.times[name].ranks
            ratios += [
                _time(name, rank, a, b)
                for rank in ("p50", "p99")
                if None not in (percentiles[rank] for percentiles in ranks)
            ]
    # a ratio to a time of zero does not exist
    finite = [ratio for ratio in ratios if ratio.a > 0]
    return Versus(metrics_a, metrics_b, tuple(finite), len(a))


def _rate(metrics_a: Figures, metrics_b: Figures) -> Ratio:
    """Return the ratio of output tokens per second, with the signed-rank interval of the pairs."""
    comparison = paired_test.judge(
        metrics_a.samples, metrics_b.samples, Design(confidence=CONFIDENCE, allowance=0.0)
    )
    assert isinstance(comparison, Comparison)
    has_interval = comparison.low > 0 and comparison.high < np.inf
    return Ratio(
        "output tok/s",
        metrics_a.output_rate,
        metrics_b.output_rate,
        comparison.ratio,
        comparison.low if has_interval else None,
        comparison.high if has_interval else None,
    )


def _time(name: str, rank: str, a: Sequence[Run], b: Sequence[Run]) -> Ratio:
    """Return the ratio of a percentile over all requests of each server. Its interval is a
    bootstrap over turns, in pairs.
    """
    share = RANKS[rank][0]
    times = [
        [
            np.asarray(seconds_of(name, [value_a for value_a in run.measured if value_a.good]))
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
        for _ in range(DRAWS):
            low, high = at(rng.choices(range(len(a)), k=len(a)))
            ratios.append(high / low if low else np.inf)
    tail = (1 - CONFIDENCE) / 2
    span = (
        (percentile(ratios, round(tail, 3)), percentile(ratios, round(1 - tail, 3)))
        if ratios
        else (None, None)
    )
    return Ratio(
        f"{name} {rank}", value_a * 1e3, value_b * 1e3, value_b / value_a if value_a else 0.0, *span
    )


def _ranked(values: NDArray[np.float64], share: float) -> float:
    """Return the nearest-rank percentile of an array. Shape: values `[n]`."""
    at = max(0, -(-len(values) * round(share * 1000) // 1000) - 1)
    return float(np.partition(values, at)[at]) if len(values) else 0.0
