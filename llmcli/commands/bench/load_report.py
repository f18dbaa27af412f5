"""What `bench load` prints, and its report page: tables, verdicts, definitions, charts."""

import sys
from collections.abc import Sequence
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmcli.bench import report_page
from llmcli.bench.load import mixes, output
from llmcli.bench.load.metrics import DEFINITIONS, Figures
from llmcli.bench.load.slo import Slo
from llmcli.bench.plots import load as drawing
from llmcli.charts.chart import Chart, Table
from llmcli.commands.options import report
from llmcli.ui import put, visible

if TYPE_CHECKING:
    from llmcli.bench.load.ab_comparison import Ratio, Versus
    from llmcli.bench.load.max_load import Edge, Rules
    from llmcli.bench.load.result import Result
    from llmcli.charts.html_page import Page
    from llmcli.ui import UI


def tell(
    result: "Result",
    form: str,
    promise: Slo | None,
    rules: "Rules | None",
    how: tuple[Path | None, bool | None],
    ui: "UI",
) -> None:
    """Print the results, then their charts."""
    if form == "md":
        _print_tables(result, rules, ui)
    elif form == "json":
        ui.result(document(result, rules))
    else:
        put(sys.stdout, visible(output.text(rows(result), form)) + "\n")
    report.show(
        lambda: made(result, promise, rules),
        lambda: charts(result, promise, rules),
        how,
        ui,
    )


def rows(result: "Result") -> list[dict[str, Any]]:
    """Return every load as a row: both sides of a comparison, all measurements of a search."""
    environment = result.worlds[0]
    row_list = [output.document(environment, figures) for figures in result.found]
    for pair in result.beside:
        row_list += [
            {**output.document(side_environment, figures), "side": side}
            for side, side_environment, figures in zip(
                "AB", result.worlds, (pair.a, pair.b), strict=True
            )
        ]
    for edge in result.edges:
        row_list += [
            {
                **output.document(environment, figures.figures),
                "find_max": edge.kind,
                "held": figures.held,
            }
            for figures in edge.points
        ]
    return row_list


def document(result: "Result", rules: "Rules | None") -> Any:
    """Return the JSON document: an array of rows, as `bench -o json`; an object for a comparison or
    a search.
    """
    if result.beside:
        tests = [
            {
                "load": entry.a.load.name,
                "turns": entry.turns,
                "ratios": [_ratio_json(ratio) for ratio in entry.ratios],
            }
            for entry in result.beside
        ]
        side_documents = [{"server": entry.server, "model": entry.model} for entry in result.worlds]
        sides = dict(zip("ab", side_documents, strict=True))
        return {**sides, "tests": tests, "rows": rows(result), "definitions": DEFINITIONS}
    if rules:
        searches = [
            {
                "find_max": entry.kind,
                "level": entry.level,
                "next": entry.above,
                "low": entry.low,
                "high": entry.high,
                "confidence": 0.9,
                "steps": entry.steps,
                "measured": len(entry.points),
                "drift": entry.drift,
            }
            for entry in result.edges
        ]
        return {
            "slo": str(rules.slo),
            "share": rules.share,
            "found": searches,
            "rows": rows(result),
            "definitions": DEFINITIONS,
        }
    return rows(result)


def charts(result: "Result", promise: Slo | None, rules: "Rules | None") -> list[Chart]:
    """Return the charts of all results."""
    built: list[Chart] = []
    for pair in result.beside:
        built += drawing.beside(pair.a.load.name, pair)
    for edge in result.edges:
        built += drawing.searched(edge, rules.share if rules else 1.0)
        built += drawing.charts([best], promise) if (best := edge.best) else []
    return built + (drawing.charts(result.found, promise) if result.found else [])


def made(result: "Result", promise: Slo | None, rules: "Rules | None") -> "Page":
    """Return the report page."""
    environment = result.worlds[0]
    names = " and ".join(f"{entry.model} at {entry.server}" for entry in result.worlds)
    about = f"{_describe_prompts(environment)} · {environment.endpoint} · {environment.began}"
    lead = [
        line for entry in result.edges for line in (verdict(entry, rules), *doubts(entry, rules))
    ]
    lead += [line for pair in result.beside for line in _ratio_lines(pair)]
    lead += [f"{entry.load.name}: {_summary_line(entry)}" for entry in result.found]
    lead += [
        f"{entry.load.name}: {doubt}" for entry in _all_figures(result) for doubt in entry.doubts
    ]
    tables = [
        (f"Times at {entry.load.name}", _as_table(output.times(entry)))
        for entry in _all_figures(result)
        if entry.times
    ]
    tables.append(("Definitions", Table(("figure", "meaning"), tuple(DEFINITIONS.items()))))
    if result.found:
        tables.insert(0, ("All loads", _as_table(output.table(result.found))))
    return report_page.of_others(
        f"Load on {names}", about, lead, charts(result, promise, rules), tables
    )


def verdict(edge: "Edge", rules: "Rules | None") -> str:
    """Return the result of a search in one line."""
    assert rules is not None
    unit = "at once" if edge.kind == "concurrency" else "requests per second"
    slo_text = f"{rules.slo} for {rules.share:.0%} of the requests"
    if edge.level is None:
        return f"no load meets {slo_text}: not even {edge.above:g} {unit}"
    next_load = "no larger load was tried" if edge.above is None else f"{edge.above:g} do not"
    interval = (
        f"the limit is between {edge.low:.3g} and {edge.high:.3g} (90 %), "
        if edge.low and edge.high
        else ""
    )
    return (
        f"{edge.level:g} {unit} meet {slo_text}; {next_load} "
        f"({interval}{len(edge.points)} measurements)"
    )


def doubts(edge: "Edge", rules: "Rules | None") -> list[str]:
    """Return what limits the reliability of a search."""
    assert rules is not None
    caveats, best = [], edge.best
    if edge.steps > 1:
        caveats.append(
            f"the noise allows steps of {edge.steps} levels instead of one: another search may "
            "differ by as much; more --requests or a quieter machine would be more precise"
        )
    if edge.level is not None and best and best.share is not None and best.share < rules.share:
        caveats.append(
            f"only {best.share:.0%} of the {best.requests} requests at {best.load.name} met the "
            "SLO: the result combines all measurements near it"
        )
    if edge.drift:
        caveats.append(
            f"the latency of a single user changed by a factor of {edge.drift:.2f} during the "
            "search: the machine changed, and the result with it"
        )
    return caveats


def _describe_prompts(world: output.World) -> str:
    """Describe the prompts that were sent; the requests of a file have their own lengths."""
    shape = world.shape
    if world.mix not in mixes.mixes():
        return f"the requests of {world.mix}, answers of {shape.output} tokens unless they set it"
    shared = f", {shape.shared:.0%} of them shared" if shape.shared else ""
    return f"{world.mix}, {shape.prompt} tokens{shared} + {shape.output}"


def _print_tables(result: "Result", rules: "Rules | None", ui: "UI") -> None:
    for world in result.worlds:
        ui.text(f"{world.model} at {world.server} · {_describe_prompts(world)}")
    ui.text()
    for pair in result.beside:
        columns = (pair.a.load.name, "A", "B", "B / A", "interval (95 %)")
        lines = [
            (
                entry.name,
                f"{entry.a:.1f}",
                f"{entry.b:.1f}",
                f"{entry.ratio:.3f}",
                _format_interval(entry),
            )
            for entry in pair.ratios
        ]
        failed = [str(sum(entry.failed.values())) for entry in (pair.a, pair.b)]
        ui.table(columns, [*lines, ("failed", *failed, "", "")], right=columns[1:])
        ui.text(f"{pair.turns} turns of each")
        ui.text()
    for edge in result.edges:
        search_rows = [
            (
                entry.figures.load.name,
                str(entry.figures.answered),
                f"{entry.figures.share or 0:.0%}",
                output.cell(entry.figures, "ttft", "p50"),
                output.cell(entry.figures, "tpot", "p50"),
                "meets SLO" if entry.held else "-",
            )
            for entry in edge.points
        ]
        names = ("load", "answered", "within SLO", "TTFT p50", "TPOT p50", "")
        ui.table(names, search_rows, right=names[1:5])
        ui.text(verdict(edge, rules))
        for doubt in doubts(edge, rules):
            ui.warn(doubt)
        ui.text()
    if len(result.found) > 1:
        ui.table(*output.table(result.found))
        ui.text()
    for entry in _all_figures(result):
        _print_load(entry, ui)
    for line in output.definitions():
        ui.text(line)


def _print_load(one: Figures, ui: "UI") -> None:
    ui.text(f"{one.load.name}: {_summary_line(one)}")
    for kind, count in one.failed.items():
        ui.text(f"  failed: {count} {kind}" + (f" ({one.says[kind]})" if kind in one.says else ""))
    if one.times:
        ui.table(*output.times(one))
    for doubt in one.doubts:
        ui.warn(doubt)
    ui.text()


def _summary_line(one: Figures) -> str:
    slo_note = (
        ""
        if one.share is None
        else f", {one.share:.0%} met the SLO (goodput {one.goodput or 0:.2f}/s)"
    )
    cancelled_note = f", {one.cancelled} cancelled" if one.cancelled else ""
    cached_note = f", {one.cached:.0%} of them cached" if one.cached is not None else ""
    return (
        f"{one.output_rate:.1f} output tok/s, {one.total_rate:.1f} total tok/s, "
        f"{one.request_rate:.2f} requests/s; {one.answered} answered, "
        f"{sum(one.failed.values())} failed{cancelled_note} in {one.seconds:.1f} s{slo_note}; "
        f"prompts {_format_tokens(one.prompt_tokens)} tokens{cached_note}, answers "
        f"{_format_tokens(one.output_tokens)}; "
        f"client delay {one.late_ms[0]:.1f} ms (p50), {one.late_ms[1]:.1f} (p99), "
        f"{one.client:.0%} of a CPU"
    )


def _format_tokens(tokens: float) -> str:
    return f"{tokens:.0f}" if isfinite(tokens) else "of unknown"


def _all_figures(result: "Result") -> list[Figures]:
    sides = [side for pair in result.beside for side in (pair.a, pair.b)]
    return [*result.found, *sides, *(best for edge in result.edges if (best := edge.best))]


def _ratio_lines(pair: "Versus") -> list[str]:
    return [
        f"{pair.a.load.name}, {ratio.name}: B is {ratio.ratio:.3f} of A ({_format_interval(ratio)})"
        for ratio in pair.ratios
    ]


def _ratio_json(one: "Ratio") -> dict[str, Any]:
    return {
        "name": one.name,
        "a": one.a,
        "b": one.b,
        "ratio": one.ratio,
        "low": one.low,
        "high": one.high,
    }


def _format_interval(one: "Ratio") -> str:
    return (
        "too few turns"
        if one.low is None or one.high is None
        else f"{one.low:.3f} to {one.high:.3f}"
    )


def _as_table(given: tuple[Sequence[str], Sequence[Sequence[str]], Sequence[str]]) -> Table:
    columns, lines, right = given
    return Table(
        tuple(columns),
        tuple(tuple(line) for line in lines),
        frozenset(at for at, name in enumerate(columns) if name in right),
    )
