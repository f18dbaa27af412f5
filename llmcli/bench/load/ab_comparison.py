"""Two servers beside each other: the same prompts in turns, a coin says who begins, and ratios with
their intervals.

Never both at once where they share a machine: each would measure the other. See paired.py for what
a pair proves.
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
TURNS = 8  # the least that can tell a difference with CONFIDENCE is 6


@dataclass(frozen=True, slots=True)
class Ratio:
    """B in units of A, with its interval; None: too few turns."""

    name: str
    a: float
    b: float
    ratio: float
    low: float | None
    high: float | None


@dataclass(frozen=True, slots=True)
class Versus:
    """Both sides under one load: their figures over all turns, and ratios. For tok/s more is
    better, for times less.
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
    """Measure `turns` of each side, each pair with prompts of its own that both get."""
    coin, runs = random.Random(number), ([], [])  # type: tuple[random.Random, tuple[list[Run], list[Run]]]
    for turn in range(turns):
        for side in (0, 1) if coin.random() < 0.5 else (1, 0):
            runs[side].append(await sides[side].run(load, length, number + turn))
            tick()
    return compared(runs[0], runs[1], slo)


def compared(a: Sequence[Run], b: Sequence[Run], slo: Slo | None = None) -> Versus:
    """What pairs of runs say."""
    one, other = figures(a, slo), figures(b, slo)
    found = [_rate(one, other)]
    for name in TIMES:
        if name in one.times and name in other.times:
            ranks = one.times[name].ranks, other.times[name].ranks
            found += [
                _time(name, rank, a, b)
                for rank in ("p50", "p99")
                if None not in (each[rank] for each in ranks)
            ]
    known = [
        ratio for ratio in found if ratio.a > 0
    ]  # to what took no time at all there is no ratio
    return Versus(one, other, tuple(known), len(a))


def _rate(one: Figures, other: Figures) -> Ratio:
    """Output tokens a second, by the signed ranks of the pairs."""
    told = paired_test.judge(
        one.samples, other.samples, Design(confidence=CONFIDENCE, allowance=0.0)
    )
    assert isinstance(told, Comparison)
    known = told.low > 0 and told.high < np.inf
    return Ratio(
        "output tok/s",
        one.output_rate,
        other.output_rate,
        told.ratio,
        told.low if known else None,
        told.high if known else None,
    )


def _time(name: str, rank: str, a: Sequence[Run], b: Sequence[Run]) -> Ratio:
    """A percentile of all requests of each side; its interval by drawing turns anew, pair by pair
    (bootstrap).
    """
    share = RANKS[rank][0]
    times = [
        [np.asarray(seconds_of(name, [one for one in run.measured if one.good])) for run in side]
        for side in (a, b)
    ]

    def at(turns: Sequence[int]) -> tuple[float, float]:
        one, other = (
            _ranked(np.concatenate([side[turn] for turn in turns]), share) for side in times
        )
        return one, other

    one, other = at(range(len(a)))
    rng, drawn = random.Random(0), []
    if len(a) >= 6 and one > 0:
        for _ in range(DRAWS):
            low, high = at(rng.choices(range(len(a)), k=len(a)))
            drawn.append(high / low if low else np.inf)
    tail = (1 - CONFIDENCE) / 2
    span = (
        (percentile(drawn, round(tail, 3)), percentile(drawn, round(1 - tail, 3)))
        if drawn
        else (None, None)
    )
    return Ratio(f"{name} {rank}", one * 1e3, other * 1e3, other / one if one else 0.0, *span)


def _ranked(values: NDArray[np.float64], share: float) -> float:
    """`percentile` of an array: nearest-rank."""
    at = max(0, -(-len(values) * round(share * 1000) // 1000) - 1)
    return float(np.partition(values, at)[at]) if len(values) else 0.0
