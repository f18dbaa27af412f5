"""Charts of speed ratios with their confidence intervals around 1."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from llmcli.charts.chart import Axis, Row, Rows, Rule, Value


@dataclass(frozen=True, slots=True)
class Ratio:
    """A speed in units of another. `low` and `high` None: no interval. `words`: the verdict."""

    name: str
    ratio: float
    low: float | None = None
    high: float | None = None
    words: str = ""


def chart(title: str, says: str, axis: str, ratios: Sequence[Ratio]) -> Rows:
    """Build a row for each ratio with its interval. Infinite intervals are not drawn."""
    rows = []
    for ratio in ratios:
        has_interval = (
            ratio.low is not None
            and ratio.high is not None
            and ratio.low > 0
            and math.isfinite(ratio.high)
        )
        span = (
            (ratio.low, ratio.high)
            if has_interval and ratio.low is not None and ratio.high is not None
            else None
        )
        rows.append(Row(ratio.name, (Value("ratio", ratio.ratio),), ratio.words, span))
    return Rows(
        title, says, Axis(axis, zero=False), tuple(rows), dots=True, rules=(Rule(1.0, "as fast"),)
    )
