"""Charts of speed ratios with their confidence intervals. Equal speed, a ratio of 1, is a reference
line.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from llmcli.charts.chart import Axis, ChartRow, NamedValue, ReferenceLine, RowChart


@dataclass(frozen=True, slots=True)
class SpeedRatio:
    """The ratio of one speed to another. `low` and `high` are None if there is no interval."""

    name: str
    ratio: float
    low: float | None = None
    high: float | None = None
    verdict: str = ""


def build_chart(title: str, description: str, axis: str, ratios: Sequence[SpeedRatio]) -> RowChart:
    """Build a chart with one row for each ratio and its interval. An infinite interval is not
    drawn.
    """
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
        rows.append(ChartRow(ratio.name, (NamedValue("ratio", ratio.ratio),), ratio.verdict, span))
    return RowChart(
        title,
        description,
        Axis(axis, from_zero=False),
        tuple(rows),
        draws_marks=True,
        reference_lines=(ReferenceLine(1.0, "as fast"),),
    )
