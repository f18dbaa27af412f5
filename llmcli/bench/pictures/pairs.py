"""Ratios with their intervals around 1: which of two is faster, and whether the noise supports it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from llmcli.bench.charts.chart import Axis, Row, Rows, Rule, Value


@dataclass(frozen=True, slots=True)
class Ratio:
    """A speed in units of another; `low` and `high` None: no interval was asked for. `words`: what
    to make of it.
    """

    name: str
    ratio: float
    low: float | None = None
    high: float | None = None
    words: str = ""


def chart(title: str, says: str, axis: str, ratios: Sequence[Ratio]) -> Rows:
    """A row for each: its estimate, and how far it may be off. An interval without an end has none
    here.
    """
    rows = []
    for one in ratios:
        known = (
            one.low is not None and one.high is not None and one.low > 0 and math.isfinite(one.high)
        )
        span = (
            (one.low, one.high) if known and one.low is not None and one.high is not None else None
        )
        rows.append(Row(one.name, (Value("ratio", one.ratio),), one.words, span))
    return Rows(
        title, says, Axis(axis, zero=False), tuple(rows), dots=True, rules=(Rule(1.0, "as fast"),)
    )
