"""What `bench load` prints, and its page: tables, verdicts, definitions, pictures."""

import sys
from collections.abc import Sequence
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmcli.bench import page
from llmcli.bench.charts.chart import Chart, Table
from llmcli.bench.load import mixes, told
from llmcli.bench.load.figures import DEFINITIONS, Figures
from llmcli.bench.load.slo import Slo
from llmcli.bench.pictures import load as drawing
from llmcli.commands import reporting
from llmcli.ui import put, visible

if TYPE_CHECKING:
    from llmcli.bench.charts.page import Page
    from llmcli.bench.load.edge import Edge, Rules
    from llmcli.bench.load.versus import Ratio, Versus
    from llmcli.commands.loading import Result
    from llmcli.ui import UI


def tell(
    result: "Result",
    form: str,
    promise: Slo | None,
    rules: "Rules | None",
    how: tuple[Path | None, bool | None],
    ui: "UI",
) -> None:
    """Print what was found, then its pictures; `how` is what --report and --chart said."""
    if form == "md":
        _words(result, rules, ui)
    elif form == "json":
        ui.result(document(result, rules))
    else:
        put(sys.stdout, visible(told.text(rows(result), form)) + "\n")
    reporting.show(
        lambda: made(result, promise, rules),
        lambda: charts(result, promise, rules),
        how,
        ui,
    )


def rows(result: "Result") -> list[dict[str, Any]]:
    """Every load as a row; of a comparison A's and B's, of a search all that it measured."""
    world = result.worlds[0]
    found = [told.document(world, one) for one in result.found]
    for pair in result.beside:
        found += [
            {**told.document(where, one), "side": side}
            for side, where, one in zip("AB", result.worlds, (pair.a, pair.b), strict=True)
        ]
    for edge in result.edges:
        found += [
            {**told.document(world, one.figures), "find_max": edge.kind, "held": one.held}
            for one in edge.points
        ]
    return found


def document(result: "Result", rules: "Rules | None") -> Any:
    """The one JSON document: an array of rows, as `bench -o json`; of a comparison or a search an
    object.
    """
    if result.beside:
        tests = [
            {
                "load": one.a.load.name,
                "turns": one.turns,
                "ratios": [_ratio(each) for each in one.ratios],
            }
            for one in result.beside
        ]
        named = [{"server": one.server, "model": one.model} for one in result.worlds]
        sides = dict(zip("ab", named, strict=True))
        return {**sides, "tests": tests, "rows": rows(result), "definitions": DEFINITIONS}
    if rules:
        found = [
            {
                "find_max": one.kind,
                "level": one.level,
                "next": one.above,
                "low": one.low,
                "high": one.high,
                "confidence": 0.9,
                "steps": one.steps,
                "measured": len(one.points),
                "drift": one.drift,
            }
            for one in result.edges
        ]
        return {
            "slo": str(rules.slo),
            "share": rules.share,
            "found": found,
            "rows": rows(result),
            "definitions": DEFINITIONS,
        }
    return rows(result)


def charts(result: "Result", promise: Slo | None, rules: "Rules | None") -> list[Chart]:
    """The pictures of all that was found."""
    drawn: list[Chart] = []
    for pair in result.beside:
        drawn += drawing.beside(pair.a.load.name, pair)
    for edge in result.edges:
        drawn += drawing.searched(edge, rules.share if rules else 1.0)
        drawn += drawing.charts([best], promise) if (best := edge.best) else []
    return drawn + (drawing.charts(result.found, promise) if result.found else [])


def made(result: "Result", promise: Slo | None, rules: "Rules | None") -> "Page":
    """The whole page."""
    world = result.worlds[0]
    names = " and ".join(f"{one.model} at {one.server}" for one in result.worlds)
    about = f"{_asked(world)} · {world.endpoint} · {world.began}"
    lead = [line for one in result.edges for line in (verdict(one, rules), *doubts(one, rules))]
    lead += [line for pair in result.beside for line in _pair(pair)]
    lead += [f"{one.load.name}: {_line(one)}" for one in result.found]
    lead += [f"{one.load.name}: {doubt}" for one in _figures(result) for doubt in one.doubts]
    tables = [
        (f"Times at {one.load.name}", _table(told.times(one)))
        for one in _figures(result)
        if one.times
    ]
    tables.append(
        ("What the figures are", Table(("figure", "meaning"), tuple(DEFINITIONS.items())))
    )
    if result.found:
        tables.insert(0, ("All loads", _table(told.table(result.found))))
    return page.of_others(f"Load on {names}", about, lead, charts(result, promise, rules), tables)


def verdict(edge: "Edge", rules: "Rules | None") -> str:
    """What a search found, in a line."""
    assert rules is not None
    unit = "at once" if edge.kind == "concurrency" else "requests a second"
    promise = f"{rules.slo} for {rules.share:.0%} of the requests"
    if edge.level is None:
        return f"no load keeps {promise}: not even {edge.above:g} {unit}"
    above = "more was not tried" if edge.above is None else f"{edge.above:g} do not"
    span = (
        f"the edge is between {edge.low:.3g} and {edge.high:.3g} (90 %), "
        if edge.low and edge.high
        else ""
    )
    return f"{edge.level:g} {unit} keep {promise}; {above} ({span}{len(edge.points)} measurements)"


def doubts(edge: "Edge", rules: "Rules | None") -> list[str]:
    """What a reader should know before believing a search."""
    assert rules is not None
    told, best = [], edge.best
    if edge.steps > 1:
        told.append(
            f"the noise allows steps of {edge.steps} levels, not of one: another search may differ by as much; "
            "more --requests, or a quieter machine, tell more"
        )
    if edge.level is not None and best and best.share is not None and best.share < rules.share:
        told.append(
            f"of the {best.requests} requests at {best.load.name} itself only {best.share:.0%} kept the promise: "
            "that it holds is what all measurements near it say"
        )
    if edge.drift:
        told.append(
            f"one user alone waited {edge.drift:.2f} times as long at one time of the search as at another: "
            "the machine changed meanwhile, and with it the edge"
        )
    return told


def _asked(world: told.World) -> str:
    """What was sent; a file's requests have their own lengths."""
    shape = world.shape
    if world.mix not in mixes.mixes():
        return (
            f"the requests of {world.mix}, answers of {shape.output} tokens where they do not say"
        )
    shared = f", {shape.shared:.0%} of it shared" if shape.shared else ""
    return f"{world.mix}, {shape.prompt} tokens{shared} + {shape.output}"


def _words(result: "Result", rules: "Rules | None", ui: "UI") -> None:
    for world in result.worlds:
        ui.text(f"{world.model} at {world.server} · {_asked(world)}")
    ui.text()
    for pair in result.beside:
        columns = (pair.a.load.name, "A", "B", "B / A", "interval (95 %)")
        lines = [
            (one.name, f"{one.a:.1f}", f"{one.b:.1f}", f"{one.ratio:.3f}", _span(one))
            for one in pair.ratios
        ]
        failed = [str(sum(one.failed.values())) for one in (pair.a, pair.b)]
        ui.table(columns, [*lines, ("failed", *failed, "", "")], right=columns[1:])
        ui.text(f"{pair.turns} turns of each")
        ui.text()
    for edge in result.edges:
        tried = [
            (
                one.figures.load.name,
                str(one.figures.answered),
                f"{one.figures.share or 0:.0%}",
                told.cell(one.figures, "ttft", "p50"),
                told.cell(one.figures, "tpot", "p50"),
                "holds" if one.held else "-",
            )
            for one in edge.points
        ]
        names = ("load", "answered", "kept", "TTFT p50", "TPOT p50", "")
        ui.table(names, tried, right=names[1:5])
        ui.text(verdict(edge, rules))
        for doubt in doubts(edge, rules):
            ui.warn(doubt)
        ui.text()
    if len(result.found) > 1:
        ui.table(*told.table(result.found))
        ui.text()
    for one in _figures(result):
        _one(one, ui)
    for line in told.definitions():
        ui.text(line)


def _one(one: Figures, ui: "UI") -> None:
    ui.text(f"{one.load.name}: {_line(one)}")
    for kind, count in one.failed.items():
        ui.text(f"  failed: {count} {kind}" + (f" ({one.says[kind]})" if kind in one.says else ""))
    if one.times:
        ui.table(*told.times(one))
    for doubt in one.doubts:
        ui.warn(doubt)
    ui.text()


def _line(one: Figures) -> str:
    promised = (
        ""
        if one.share is None
        else f", {one.share:.0%} kept the promise (goodput {one.goodput or 0:.2f}/s)"
    )
    gone = f", {one.cancelled} went away" if one.cancelled else ""
    cached = f", {one.cached:.0%} of it cached" if one.cached is not None else ""
    return (
        f"{one.output_rate:.1f} output tok/s, {one.total_rate:.1f} total tok/s, {one.request_rate:.2f} requests/s; "
        f"{one.answered} answered, {sum(one.failed.values())} failed{gone} in {one.seconds:.1f} s{promised}; "
        f"prompts {_count(one.prompt_tokens)} tokens{cached}, answers {_count(one.output_tokens)}; "
        f"client late {one.late_ms[0]:.1f} ms (p50), {one.late_ms[1]:.1f} (p99), {one.client:.0%} of a CPU"
    )


def _count(tokens: float) -> str:
    return f"{tokens:.0f}" if isfinite(tokens) else "of unknown"


def _figures(result: "Result") -> list[Figures]:
    sides = [one for pair in result.beside for one in (pair.a, pair.b)]
    return [*result.found, *sides, *(best for edge in result.edges if (best := edge.best))]


def _pair(pair: "Versus") -> list[str]:
    return [
        f"{pair.a.load.name}, {one.name}: B is {one.ratio:.3f} of A ({_span(one)})"
        for one in pair.ratios
    ]


def _ratio(one: "Ratio") -> dict[str, Any]:
    return {
        "name": one.name,
        "a": one.a,
        "b": one.b,
        "ratio": one.ratio,
        "low": one.low,
        "high": one.high,
    }


def _span(one: "Ratio") -> str:
    return (
        "too few turns"
        if one.low is None or one.high is None
        else f"{one.low:.3f} to {one.high:.3f}"
    )


def _table(given: tuple[Sequence[str], Sequence[Sequence[str]], Sequence[str]]) -> Table:
    columns, lines, right = given
    return Table(
        tuple(columns),
        tuple(tuple(line) for line in lines),
        frozenset(at for at, name in enumerate(columns) if name in right),
    )
