"""Charts of load tests: latency percentiles, latency and throughput over the load, and the
measurements of a search for the largest load.
"""

from collections.abc import Sequence
from itertools import groupby

from llmcli.bench.load.ab_comparison import ServerComparison
from llmcli.bench.load.max_load import MaxLoadResult
from llmcli.bench.load.metrics import PERCENTILES, TIME_METRICS, LoadMetrics
from llmcli.bench.load.slo import Slo
from llmcli.bench.plots import pairs
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
from llmcli.charts.scale import format_number

METRIC_LABELS = {
    "ttft": "time to first token",
    "ttfo": "time to first answer token",
    "tpot": "time per token",
    "itl": "gaps between tokens",
    "e2el": "whole answer",
}


def build_charts(loads: Sequence[LoadMetrics], slo: Slo | None = None) -> list[Chart]:
    """Build the charts of one or several loads. `slo`: the latency limits, drawn as lines; None: no
    limits.
    """
    drawn: list[Chart] = []
    for closed, group in groupby(
        sorted(loads, key=lambda metrics: not metrics.load.is_closed),
        lambda metrics: metrics.load.is_closed,
    ):
        by_level = sorted(group, key=lambda metrics: metrics.load.level)
        if len({metrics.load.level for metrics in by_level}) > 1:
            axis = Axis("requests at once" if closed else "requests a second sent")
            drawn += [
                _latency(by_level, axis, name) for name in ("ttft", "tpot") if _has(by_level, name)
            ]
            drawn.append(_throughput(by_level, axis))
    answered = [metrics for metrics in loads if metrics.times]
    if answered:
        drawn.append(_rates(answered))
        drawn += [
            _percentiles(answered, name, slo) for name in TIME_METRICS if _has(answered, name)
        ]
    return drawn


def build_search_charts(max_load: MaxLoadResult, required_share: float) -> list[Chart]:
    """Build the chart of a search for the largest load. Each measurement is a point at the share of
    its requests that were within the latency limits.
    """
    shares = [(point, point.metrics.slo_share) for point in max_load.measurements]
    unit = "requests at once" if max_load.kind == "concurrency" else "requests a second"
    series = [
        Series(
            name,
            tuple(
                Point(point.level, 100 * share)
                for point, share in shares
                if share is not None and point.keeps_limits is keeps_limits
            ),
            line=False,
        )
        for name, keeps_limits in (("holds", True), ("does not hold", False))
    ]
    largest_load = (
        f" The largest load is between {max_load.low:.3g} and {max_load.high:.3g} (90 % confidence)."
        if max_load.low and max_load.high
        else ""
    )
    description = (
        f"Required: {required_share:.0%} of the requests within the limits.{largest_load} Measurements far from"
        " the limits are ended early."
    )
    rules = () if max_load.level is None else (ReferenceLine(max_load.level, "largest"),)
    shown = tuple(line for line in series if line.points)
    return [
        Plot(
            "What the search measured",
            description,
            Axis(unit, is_log=True),
            Axis("% within the limits"),
            shown,
            rules,
        )
    ]


def build_comparison_charts(name: str, comparison: ServerComparison) -> list[Chart]:
    """Build the chart of the ratios B / A between two servers. `name`: the name of the load."""
    ratios = [
        pairs.SpeedRatio(ratio.name, ratio.ratio, ratio.low, ratio.high, f"{ratio.ratio:.3f}")
        for ratio in comparison.ratios
    ]
    description = (
        f"{comparison.turns} turns of each server. Above 1 is better for tok/s, below 1 for times."
        " Intervals of 95 %."
    )
    return [pairs.build_chart(f"B in units of A, {name}", description, "B / A", ratios)]


def _latency(loads: Sequence[LoadMetrics], axis: Axis, name: str) -> Plot:
    series = []
    for rank in ("p50", "p99"):
        points = [
            Point(metrics.load.level, ms)
            for metrics in loads
            if (ms := _at(metrics, name, rank)) is not None
        ]
        if points:
            series.append(Series(rank, tuple(points)))
    low, high = series[0].points[0], series[0].points[-1]
    description = (
        f"Median: {format_number(low.y)} ms at {low.x:g}, {format_number(high.y)} ms at {high.x:g}."
    )
    return Plot(
        f"{METRIC_LABELS[name].capitalize()} over load",
        description,
        axis,
        Axis("ms"),
        tuple(series),
    )


def _throughput(loads: Sequence[LoadMetrics], axis: Axis) -> Plot:
    points = tuple(
        Point(metrics.load.level, metrics.output_rate, format_number(metrics.output_rate))
        for metrics in loads
    )
    best = max(points, key=lambda point: point.y)
    description = f"Maximum: {format_number(best.y)} output tokens a second at {best.x:g}."
    return Plot(
        "Throughput over load",
        description,
        axis,
        Axis("output tokens a second"),
        (Series("", points),),
    )


def _rates(loads: Sequence[LoadMetrics]) -> RowChart:
    rows = [
        ChartRow(
            metrics.load.name,
            (NamedValue("output tokens a second", metrics.output_rate),),
            format_number(metrics.output_rate),
            _span(metrics),
        )
        for metrics in loads
    ]
    description = "Tokens of all requests that arrived during the measurement."
    return RowChart("Throughput", description, Axis("output tokens a second"), tuple(rows))


def _percentiles(loads: Sequence[LoadMetrics], name: str, slo: Slo | None) -> RowChart:
    rows = []
    for metrics in loads:
        ranks = metrics.times[name].percentiles.items() if name in metrics.times else ()
        if values := tuple(NamedValue(rank, ms) for rank, ms in ranks if ms is not None):
            rows.append(ChartRow(metrics.load.name, values))
    limit = None if slo is None else slo.limits.get(name)
    all_values = [value.value for row in rows for value in row.values]
    log = min(all_values) > 0 and max(all_values) > 8 * min(all_values)
    description = f"{', '.join(PERCENTILES)} where there are enough values; smaller is better."
    rules = () if limit is None else (ReferenceLine(limit, "limit"),)
    return RowChart(
        METRIC_LABELS[name].capitalize(),
        description,
        Axis("ms", log),
        tuple(rows),
        draws_marks=True,
        reference_lines=rules,
    )


def _span(metrics: LoadMetrics) -> tuple[float, float] | None:
    return (
        (min(metrics.repetition_rates), max(metrics.repetition_rates))
        if len(metrics.repetition_rates) > 1
        else None
    )


def _has(loads: Sequence[LoadMetrics], name: str) -> bool:
    return any(name in metrics.times for metrics in loads)


def _at(metrics: LoadMetrics, name: str, rank: str) -> float | None:
    return metrics.times[name].percentiles[rank] if name in metrics.times else None
