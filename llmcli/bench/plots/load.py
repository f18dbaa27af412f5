"""Charts of load tests: latency percentiles, latency and throughput over load, and the measurements
of a search.
"""

from collections.abc import Sequence
from itertools import groupby

from llmcli.bench.load.ab_comparison import Versus
from llmcli.bench.load.max_load import Edge
from llmcli.bench.load.metrics import RANKS, TIMES, Figures
from llmcli.bench.load.slo import Slo
from llmcli.bench.plots import pairs
from llmcli.charts.chart import Axis, Chart, Plot, Point, Row, Rows, Rule, Series, Value
from llmcli.charts.scale import figure

WORDS = {
    "ttft": "time to first token",
    "tpot": "time per token",
    "itl": "gaps between tokens",
    "e2el": "whole answer",
}


def charts(found: Sequence[Figures], slo: Slo | None = None) -> list[Chart]:
    """Build the charts of one or several loads."""
    drawn: list[Chart] = []
    for closed, group in groupby(
        sorted(found, key=lambda metrics: not metrics.load.closed),
        lambda metrics: metrics.load.closed,
    ):
        by_level = sorted(group, key=lambda metrics: metrics.load.level)
        if len({metrics.load.level for metrics in by_level}) > 1:
            axis = Axis("requests at once" if closed else "requests a second asked")
            drawn += [
                _latency(by_level, axis, name) for name in ("ttft", "tpot") if _has(by_level, name)
            ]
            drawn.append(_throughput(by_level, axis))
    answered = [metrics for metrics in found if metrics.times]
    if answered:
        drawn.append(_rates(answered))
        drawn += [_percentiles(answered, name, slo) for name in TIMES if _has(answered, name)]
    return drawn


def searched(edge: Edge, share: float) -> list[Chart]:
    """Build the chart of all measurements of a search: the share of requests within the limits at
    each level.
    """
    shares = [(point, point.figures.share) for point in edge.points]
    unit = "requests at once" if edge.kind == "concurrency" else "requests a second"
    series = [
        Series(
            name,
            tuple(
                Point(point.level, 100 * kept)
                for point, kept in shares
                if kept is not None and point.held is held
            ),
            line=False,
        )
        for name, held in (("holds", True), ("does not hold", False))
    ]
    edge_at = (
        f" The largest load is between {edge.low:.3g} and {edge.high:.3g} (90 % confidence)."
        if edge.low and edge.high
        else ""
    )
    says = (
        f"Required: {share:.0%} of the requests within the limits.{edge_at} Measurements far from"
        " the limits are ended early."
    )
    rules = () if edge.level is None else (Rule(edge.level, "largest"),)
    shown = tuple(line for line in series if line.points)
    return [
        Plot(
            "What the search measured",
            says,
            Axis(unit, log=True),
            Axis("% that kept the promise"),
            shown,
            rules,
        )
    ]


def beside(name: str, found: Versus) -> list[Chart]:
    """Build the chart of the ratios of two servers."""
    ratios = [
        pairs.Ratio(ratio.name, ratio.ratio, ratio.low, ratio.high, f"{ratio.ratio:.3f}")
        for ratio in found.ratios
    ]
    says = (
        f"{found.turns} turns of each server. Above 1 is better for tok/s, below 1 for times."
        " Intervals of 95 %."
    )
    return [pairs.chart(f"B in units of A, {name}", says, "B / A", ratios)]


def _latency(loads: Sequence[Figures], axis: Axis, name: str) -> Plot:
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
    says = f"Median: {figure(low.y)} ms at {low.x:g}, {figure(high.y)} ms at {high.x:g}."
    return Plot(f"{WORDS[name].capitalize()} over load", says, axis, Axis("ms"), tuple(series))


def _throughput(loads: Sequence[Figures], axis: Axis) -> Plot:
    points = tuple(
        Point(metrics.load.level, metrics.output_rate, figure(metrics.output_rate))
        for metrics in loads
    )
    best = max(points, key=lambda point: point.y)
    says = f"Maximum: {figure(best.y)} output tokens a second at {best.x:g}."
    return Plot(
        "Throughput over load", says, axis, Axis("output tokens a second"), (Series("", points),)
    )


def _rates(loads: Sequence[Figures]) -> Rows:
    rows = [
        Row(
            metrics.load.name,
            (Value("output tokens a second", metrics.output_rate),),
            figure(metrics.output_rate),
            _span(metrics),
        )
        for metrics in loads
    ]
    says = "Tokens of all requests that arrived during the measurement."
    return Rows("Throughput", says, Axis("output tokens a second"), tuple(rows))


def _percentiles(loads: Sequence[Figures], name: str, slo: Slo | None) -> Rows:
    rows = []
    for metrics in loads:
        ranks = metrics.times[name].ranks.items() if name in metrics.times else ()
        if values := tuple(Value(rank, ms) for rank, ms in ranks if ms is not None):
            rows.append(Row(metrics.load.name, values))
    limit = None if slo is None else slo.limits.get(name)
    all_values = [value.value for row in rows for value in row.values]
    log = min(all_values) > 0 and max(all_values) > 8 * min(all_values)
    says = f"{', '.join(RANKS)} where there are enough values; smaller is better."
    rules = () if limit is None else (Rule(limit, "promised"),)
    return Rows(
        WORDS[name].capitalize(), says, Axis("ms", log), tuple(rows), dots=True, rules=rules
    )


def _span(metrics: Figures) -> tuple[float, float] | None:
    return (min(metrics.samples), max(metrics.samples)) if len(metrics.samples) > 1 else None


def _has(loads: Sequence[Figures], name: str) -> bool:
    return any(name in metrics.times for metrics in loads)


def _at(metrics: Figures, name: str, rank: str) -> float | None:
    return metrics.times[name].ranks[rank] if name in metrics.times else None
