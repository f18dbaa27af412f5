"""Charts of `bench spec`: acceptance by depth, the speed of drafting beside its bound, and the cost
of passes.
"""

import math
from collections.abc import Sequence

from llmcli.bench.spec.measure import MethodResult, TaskResult
from llmcli.charts.chart import (
    Axis,
    Chart,
    ChartRow,
    NamedValue,
    Plot,
    Point,
    ReferenceLine,
    RowChart,
    Series,
)


def build_charts(methods: Sequence[MethodResult]) -> list[Chart]:
    """Return the speed chart, a chart of the acceptance of each method with any checked guess, and
    the chart of the cost of passes.
    """
    speeds = [_speed_row(method, task) for method in methods for task in method.tasks]
    rows = [row for row in speeds if row is not None]
    charts: list[Chart] = []
    if rows:
        charts.append(
            RowChart(
                "Speed relative to plain decoding",
                "Measured speed with its 95 % interval, and the bound: what the acceptance and the "
                "cost of passes allow with drafts of the best length.",
                Axis("drafts / plain", from_zero=False),
                tuple(rows),
                draws_marks=True,
                reference_lines=(ReferenceLine(1.0, "plain"),),
            )
        )
    charts += [chart for method in methods if (chart := _acceptance_chart(method))]
    return [*charts, _cost_chart(methods)]


def _speed_row(method: MethodResult, task: TaskResult) -> ChartRow | None:
    """Return the row of a task; None without a measured speed."""
    speed = task.comparison
    if speed is None:
        return None
    has_interval = speed.low > 0 and math.isfinite(speed.high)
    bound = method.bound(task)
    return ChartRow(
        f"{method.method}, {task.task}",
        (NamedValue("measured", speed.ratio), NamedValue("bound", bound.speed)),
        f"{speed.ratio:.2f} of {bound.speed:.2f}",
        (speed.low, speed.high) if has_interval else None,
    )


def _acceptance_chart(method: MethodResult) -> Plot | None:
    """Return the acceptance of a method by depth, a line for each task; None if no guess was
    checked.
    """
    series = tuple(
        Series(task.task, points) for task in method.tasks if (points := _acceptance_points(task))
    )
    if not series:
        return None
    return Plot(
        f"Acceptance of {method.method}",
        "The share of guesses that were right, if all guesses before them in the draft were. "
        f"Tasks: {', '.join(line.name for line in series)}.",
        Axis("guess of the draft"),
        Axis("% right"),
        series,
    )


def _acceptance_points(task: TaskResult) -> tuple[Point, ...]:
    return tuple(
        Point(depth, 100 * share)
        for depth, share in enumerate(task.longest.acceptance, 1)
        if share is not None
    )


def _cost_chart(methods: Sequence[MethodResult]) -> Plot:
    """Return the cost of passes by their number of rows, a line for each method's context."""
    series = tuple(
        Series(
            method.method,
            tuple(Point(rows, method.cost.ratio(rows)) for rows in sorted(method.cost.ratios)),
        )
        for method in methods
    )
    return Plot(
        "Cost of a pass",
        "T(m) / T(1): the time of a pass of m rows relative to one row, with an empty cache. A draft "
        "of m - 1 guesses saves time if its pass brings more tokens than this.",
        Axis("rows"),
        Axis("passes of one row"),
        series,
    )
