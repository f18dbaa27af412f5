"""What `bench load` prints, and its report page: tables, verdicts, definitions, charts."""

import sys
from math import isfinite
from typing import TYPE_CHECKING, Any

from llmcli.bench import report_page
from llmcli.bench.load import mixes, output
from llmcli.bench.load.metrics import METRIC_DEFINITIONS, LoadMetrics
from llmcli.bench.load.slo import Slo
from llmcli.bench.plots import load
from llmcli.charts.chart import Chart, Table
from llmcli.commands.options.report import ReportSettings, show_report
from llmcli.ui import escape_controls, write_now

if TYPE_CHECKING:
    from llmcli.bench.load.ab_comparison import MetricRatio, ServerComparison
    from llmcli.bench.load.max_load import MaxLoadResult, MaxLoadSettings
    from llmcli.bench.load.request import LoadRequest
    from llmcli.bench.load.result import LoadResult
    from llmcli.charts.html_page import ReportPage
    from llmcli.ui import UI


def print_results(
    result: "LoadResult",
    request: "LoadRequest",
    output_format: str,
    reporting: ReportSettings,
    ui: "UI",
) -> None:
    """Print the results, then their charts."""
    slo, search = request.search.limits, request.search_rules
    if output_format == "md":
        _print_tables(result, search, ui)
    elif output_format == "json":
        ui.result(build_document(result, search))
    else:
        write_now(
            sys.stdout,
            escape_controls(output.format_rows(result_rows(result), output_format)) + "\n",
        )
    show_report(
        lambda: build_page(result, slo, search),
        lambda: build_charts(result, slo, search),
        reporting,
        ui,
    )


def result_rows(result: "LoadResult") -> list[dict[str, Any]]:
    """Return every load as a row: both sides of a comparison, all measurements of a search."""
    environment = result.environments[0]
    row_list = [output.build_row(environment, figures) for figures in result.measured]
    for pair in result.comparisons:
        row_list += [
            {**output.build_row(side_environment, figures), "side": side}
            for side, side_environment, figures in zip(
                "AB", result.environments, (pair.a, pair.b), strict=True
            )
        ]
    for edge in result.max_loads:
        row_list += [
            {
                **output.build_row(environment, figures.metrics),
                "find_max": edge.kind,
                "held": figures.keeps_limits,
            }
            for figures in edge.measurements
        ]
    return row_list


def build_document(result: "LoadResult", search: "MaxLoadSettings | None") -> Any:
    """Return the JSON document: an array of rows, as `bench -o json`; an object for a comparison or
    a search.
    """
    if result.comparisons:
        tests = [
            {
                "load": entry.a.load.name,
                "turns": entry.turns,
                "ratios": [_ratio_json(ratio) for ratio in entry.ratios],
            }
            for entry in result.comparisons
        ]
        side_documents = [
            {"server": entry.server, "model": entry.model} for entry in result.environments
        ]
        sides = dict(zip("ab", side_documents, strict=True))
        return {
            **sides,
            "tests": tests,
            "rows": result_rows(result),
            "definitions": METRIC_DEFINITIONS,
        }
    if search:
        searches = [
            {
                "find_max": entry.kind,
                "level": entry.level,
                "next": entry.next_level,
                "low": entry.low,
                "high": entry.high,
                "confidence": 0.9,
                "steps": entry.steps,
                "measured": len(entry.measurements),
                "drift": entry.drift,
            }
            for entry in result.max_loads
        ]
        return {
            "slo": str(search.slo),
            "share": search.required_share,
            "found": searches,
            "rows": result_rows(result),
            "definitions": METRIC_DEFINITIONS,
        }
    return result_rows(result)


def build_charts(
    result: "LoadResult", slo: Slo | None, search: "MaxLoadSettings | None"
) -> list[Chart]:
    """Return the charts of all results."""
    built: list[Chart] = []
    for pair in result.comparisons:
        built += load.build_comparison_charts(pair.a.load.name, pair)
    for edge in result.max_loads:
        built += load.build_search_charts(edge, search.required_share if search else 1.0)
        built += load.build_charts([best], slo) if (best := edge.best_metrics) else []
    return built + (load.build_charts(result.measured, slo) if result.measured else [])


def build_page(
    result: "LoadResult", slo: Slo | None, search: "MaxLoadSettings | None"
) -> "ReportPage":
    """Return the report page."""
    environment = result.environments[0]
    names = " and ".join(f"{entry.model} at {entry.server}" for entry in result.environments)
    about = f"{_describe_prompts(environment)} · {environment.endpoint} · {environment.start_time}"
    lead = [
        line
        for entry in result.max_loads
        for line in (search_verdict(entry, search), *search_caveats(entry, search))
    ]
    lead += [line for pair in result.comparisons for line in _ratio_lines(pair)]
    lead += [f"{entry.load.name}: {_summary_line(entry)}" for entry in result.measured]
    lead += [
        f"{entry.load.name}: {doubt}" for entry in _all_figures(result) for doubt in entry.warnings
    ]
    tables = [
        (f"Times at {entry.load.name}", output.build_percentile_table(entry))
        for entry in _all_figures(result)
        if entry.times
    ]
    tables.append(("Definitions", Table(("figure", "meaning"), tuple(METRIC_DEFINITIONS.items()))))
    if result.measured:
        tables.insert(0, ("All loads", output.build_table(result.measured)))
    return report_page.build_page(
        f"Load on {names}", about, lead, build_charts(result, slo, search), tables
    )


def search_verdict(edge: "MaxLoadResult", search: "MaxLoadSettings | None") -> str:
    """Return the result of a search in one line."""
    assert search is not None
    unit = "at once" if edge.kind == "concurrency" else "requests per second"
    slo_text = f"{search.slo} for {search.required_share:.0%} of the requests"
    if edge.level is None:
        return f"no load meets {slo_text}: not even {edge.next_level:g} {unit}"
    next_load = (
        "no larger load was tried" if edge.next_level is None else f"{edge.next_level:g} do not"
    )
    interval = (
        f"the limit is between {edge.low:.3g} and {edge.high:.3g} (90 %), "
        if edge.low and edge.high
        else ""
    )
    return (
        f"{edge.level:g} {unit} meet {slo_text}; {next_load} "
        f"({interval}{len(edge.measurements)} measurements)"
    )


def search_caveats(edge: "MaxLoadResult", search: "MaxLoadSettings | None") -> list[str]:
    """Return what limits the reliability of a search."""
    assert search is not None
    caveats, best = [], edge.best_metrics
    if edge.steps > 1:
        caveats.append(
            f"the noise allows steps of {edge.steps} levels instead of one: another search may "
            "differ by as much; more --requests or a quieter machine would be more precise"
        )
    if (
        edge.level is not None
        and best
        and best.slo_share is not None
        and best.slo_share < search.required_share
    ):
        caveats.append(
            f"only {best.slo_share:.0%} of the {best.requests} requests at {best.load.name} met the "
            "SLO: the result combines all measurements near it"
        )
    if edge.drift:
        caveats.append(
            f"the latency of a single user changed by a factor of {edge.drift:.2f} during the "
            "search: the machine changed, and the result with it"
        )
    return caveats


def _describe_prompts(environment: output.LoadEnvironment) -> str:
    """Describe the prompts that were sent; the requests of a file have their own lengths."""
    shape = environment.lengths
    if environment.mix not in mixes.load_mixes():
        return f"the requests of {environment.mix}, answers of {shape.output_tokens} tokens unless they set it"
    shared = f", {shape.shared_fraction:.0%} of them shared" if shape.shared_fraction else ""
    return f"{environment.mix}, {shape.prompt_tokens} tokens{shared} + {shape.output_tokens}"


def _print_tables(result: "LoadResult", search: "MaxLoadSettings | None", ui: "UI") -> None:
    for world in result.environments:
        ui.text(f"{world.model} at {world.server} · {_describe_prompts(world)}")
    ui.text()
    for pair in result.comparisons:
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
    for edge in result.max_loads:
        search_rows = [
            (
                entry.metrics.load.name,
                str(entry.metrics.answered),
                f"{entry.metrics.slo_share or 0:.0%}",
                output.format_percentile(entry.metrics, "ttft", "p50"),
                output.format_percentile(entry.metrics, "tpot", "p50"),
                "meets SLO" if entry.keeps_limits else "-",
            )
            for entry in edge.measurements
        ]
        names = ("load", "answered", "within SLO", "TTFT p50", "TPOT p50", "")
        ui.table(names, search_rows, right=names[1:5])
        ui.text(search_verdict(edge, search))
        for doubt in search_caveats(edge, search):
            ui.warn(doubt)
        ui.text()
    if len(result.measured) > 1:
        _print_table(output.build_table(result.measured), ui)
        ui.text()
    for entry in _all_figures(result):
        _print_load(entry, ui)
    for line in output.definition_lines():
        ui.text(line)


def _print_load(measured: LoadMetrics, ui: "UI") -> None:
    ui.text(f"{measured.load.name}: {_summary_line(measured)}")
    for kind, count in measured.failed.items():
        ui.text(
            f"  failed: {count} {kind}"
            + (f" ({measured.error_examples[kind]})" if kind in measured.error_examples else "")
        )
    if measured.times:
        _print_table(output.build_percentile_table(measured), ui)
    for doubt in measured.warnings:
        ui.warn(doubt)
    ui.text()


def _summary_line(measured: LoadMetrics) -> str:
    slo_note = (
        ""
        if measured.slo_share is None
        else f", {measured.slo_share:.0%} met the SLO (goodput {measured.goodput or 0:.2f}/s)"
    )
    cancelled_note = f", {measured.cancelled} cancelled" if measured.cancelled else ""
    cached_note = (
        f", {measured.cached_share:.0%} of them cached" if measured.cached_share is not None else ""
    )
    return (
        f"{measured.output_rate:.1f} output tok/s, {measured.total_rate:.1f} total tok/s, "
        f"{measured.request_rate:.2f} requests/s; {measured.answered} answered, "
        f"{sum(measured.failed.values())} failed{cancelled_note} in {measured.seconds:.1f} s{slo_note}; "
        f"prompts {_format_tokens(measured.prompt_tokens)} tokens{cached_note}, answers "
        f"{_format_tokens(measured.output_tokens)}; "
        f"client delay {measured.late_ms[0]:.1f} ms (p50), {measured.late_ms[1]:.1f} (p99), "
        f"{measured.client_cpu:.0%} of a CPU"
    )


def _format_tokens(tokens: float) -> str:
    return f"{tokens:.0f}" if isfinite(tokens) else "of unknown"


def _all_figures(result: "LoadResult") -> list[LoadMetrics]:
    sides = [side for pair in result.comparisons for side in (pair.a, pair.b)]
    return [
        *result.measured,
        *sides,
        *(best for edge in result.max_loads if (best := edge.best_metrics)),
    ]


def _ratio_lines(pair: "ServerComparison") -> list[str]:
    return [
        f"{pair.a.load.name}, {ratio.name}: B is {ratio.ratio:.3f} of A ({_format_interval(ratio)})"
        for ratio in pair.ratios
    ]


def _ratio_json(ratio: "MetricRatio") -> dict[str, Any]:
    return {
        "name": ratio.name,
        "a": ratio.a,
        "b": ratio.b,
        "ratio": ratio.ratio,
        "low": ratio.low,
        "high": ratio.high,
    }


def _format_interval(ratio: "MetricRatio") -> str:
    return (
        "too few turns"
        if ratio.low is None or ratio.high is None
        else f"{ratio.low:.3f} to {ratio.high:.3f}"
    )


def _print_table(table: Table, ui: "UI") -> None:
    ui.table(table.columns, table.rows, right=table.right_columns)
