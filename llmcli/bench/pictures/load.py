"""A load as pictures: percentiles of its times, latency and throughput over load, and what a search
tried.
"""

from collections.abc import Sequence
from itertools import groupby

from llmcli.bench.charts.chart import Axis, Chart, Plot, Point, Row, Rows, Rule, Series, Value
from llmcli.bench.charts.scale import figure
from llmcli.bench.load.edge import Edge
from llmcli.bench.load.figures import RANKS, TIMES, Figures
from llmcli.bench.load.slo import Slo
from llmcli.bench.load.versus import Versus
from llmcli.bench.pictures import pairs

WORDS = {
    "ttft": "time to first token",
    "tpot": "time per token",
    "itl": "gaps between tokens",
    "e2el": "whole answer",
}


def charts(found: Sequence[Figures], slo: Slo | None = None) -> list[Chart]:
    """What there is to draw of one load, or of several."""
    drawn: list[Chart] = []
    for closed, group in groupby(
        sorted(found, key=lambda one: not one.load.closed), lambda one: one.load.closed
    ):
        several = sorted(group, key=lambda one: one.load.level)
        if len({one.load.level for one in several}) > 1:
            axis = Axis("requests at once" if closed else "requests a second asked")
            drawn += [
                _latency(several, axis, name) for name in ("ttft", "tpot") if _has(several, name)
            ]
            drawn.append(_throughput(several, axis))
    answered = [one for one in found if one.times]
    if answered:
        drawn.append(_rates(answered))
        drawn += [_percentiles(answered, name, slo) for name in TIMES if _has(answered, name)]
    return drawn


def searched(edge: Edge, share: float) -> list[Chart]:
    """Every level that a search measured: what part of its requests kept the promise, and the time
    to first token.
    """
    told = [(one, one.figures.share) for one in edge.points]
    unit = "requests at once" if edge.kind == "concurrency" else "requests a second"
    series = [
        Series(
            name,
            tuple(
                Point(one.level, 100 * kept)
                for one, kept in told
                if kept is not None and one.held is held
            ),
            line=False,
        )
        for name, held in (("holds", True), ("does not hold", False))
    ]
    edge_at = (
        f" The edge is between {edge.low:.3g} and {edge.high:.3g} (90 %)."
        if edge.low and edge.high
        else ""
    )
    says = (
        f"Needed: {share:.0%} of the requests.{edge_at} A level far from the promise is left early."
    )
    rules = () if edge.level is None else (Rule(edge.level, "largest"),)
    shown = tuple(one for one in series if one.points)
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
    """Ratios of two servers around 1."""
    ratios = [
        pairs.Ratio(one.name, one.ratio, one.low, one.high, f"{one.ratio:.3f}")
        for one in found.ratios
    ]
    says = (
        f"{found.turns} turns of each; of tok/s more is better, of times less. Intervals of 95 %."
    )
    return [pairs.chart(f"B in units of A, {name}", says, "B / A", ratios)]


def _latency(found: Sequence[Figures], axis: Axis, name: str) -> Plot:
    series = []
    for rank in ("p50", "p99"):
        points = [
            Point(one.load.level, ms) for one in found if (ms := _at(one, name, rank)) is not None
        ]
        if points:
            series.append(Series(rank, tuple(points)))
    low, high = series[0].points[0], series[0].points[-1]
    says = (
        f"Half of the requests: {figure(low.y)} ms at {low.x:g}, {figure(high.y)} ms at {high.x:g}."
    )
    return Plot(f"{WORDS[name].capitalize()} over load", says, axis, Axis("ms"), tuple(series))


def _throughput(found: Sequence[Figures], axis: Axis) -> Plot:
    points = tuple(Point(one.load.level, one.output_rate, figure(one.output_rate)) for one in found)
    best = max(points, key=lambda point: point.y)
    says = f"Most: {figure(best.y)} output tokens a second at {best.x:g}."
    return Plot(
        "Throughput over load", says, axis, Axis("output tokens a second"), (Series("", points),)
    )


def _rates(found: Sequence[Figures]) -> Rows:
    rows = [
        Row(
            one.load.name,
            (Value("output tokens a second", one.output_rate),),
            figure(one.output_rate),
            _span(one),
        )
        for one in found
    ]
    says = "Tokens that arrived while it was measured, of all requests."
    return Rows("Throughput", says, Axis("output tokens a second"), tuple(rows))


def _percentiles(found: Sequence[Figures], name: str, slo: Slo | None) -> Rows:
    rows = []
    for one in found:
        ranks = one.times[name].ranks.items() if name in one.times else ()
        if values := tuple(Value(rank, ms) for rank, ms in ranks if ms is not None):
            rows.append(Row(one.load.name, values))
    most = None if slo is None else slo.limits.get(name)
    every = [value.value for row in rows for value in row.values]
    log = min(every) > 0 and max(every) > 8 * min(every)
    says = f"{', '.join(RANKS)} where there are values enough; smaller is better."
    rules = () if most is None else (Rule(most, "promised"),)
    return Rows(
        WORDS[name].capitalize(), says, Axis("ms", log), tuple(rows), dots=True, rules=rules
    )


def _span(one: Figures) -> tuple[float, float] | None:
    return (min(one.samples), max(one.samples)) if len(one.samples) > 1 else None


def _has(found: Sequence[Figures], name: str) -> bool:
    return any(name in one.times for one in found)


def _at(one: Figures, name: str, rank: str) -> float | None:
    return one.times[name].ranks[rank] if name in one.times else None
