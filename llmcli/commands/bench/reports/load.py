"""The text output, the charts and the HTML report of `llmcli bench load`."""

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
from llmcli.ui import escape_controls, escape_json_controls, write_now

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
    """Print the results in the output format ("md", "csv", "json" or "jsonl"), then draw the charts
    and write the report.
    """
    slo, search = request.search.limits, request.search_rules
    if output_format == "md":
        _print_tables(result, search, ui)
    elif output_format == "json":
        ui.result(build_document(result, search))
    else:
        escape = escape_json_controls if output_format == "jsonl" else escape_controls
        write_now(sys.stdout, escape(output.format_rows(result_rows(result), output_format)) + "\n")
    show_report(
        lambda: build_page(result, slo, search),
        lambda: build_charts(result, slo, search),
        reporting,
        ui,
    )


def result_rows(result: "LoadResult") -> list[dict[str, Any]]:
    """Return a JSON object for every measured load. A comparison has the loads of both servers; a
    search for the largest load has one for each measurement.
    """
    environment = result.environments[0]
    rows = [output.build_row(environment, metrics) for metrics in result.measured]
    for pair in result.comparisons:
        rows += [
            {**output.build_row(side_environment, metrics), "side": side}
            for side, side_environment, metrics in zip(
                "AB", result.environments, (pair.a, pair.b), strict=True
            )
        ]
    for max_load in result.max_loads:
        rows += [
            {
                **output.build_row(environment, measurement.metrics),
                "find_max": max_load.kind,
                "held": measurement.keeps_limits,
            }
            for measurement in max_load.measurements
        ]
    return rows


def build_document(result: "LoadResult", search: "MaxLoadSettings | None") -> Any:
    """Return the JSON document. For a list of loads, it is the list of `result_rows`. For a
    comparison or a search, it is an object that also contains the ratios or the largest load.
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
    """Return the charts of all results. `slo`: the latency limits; None: no limits. `search`: the
    settings of the search for the largest load; None: no search.
    """
    charts: list[Chart] = []
    for pair in result.comparisons:
        charts += load.build_comparison_charts(pair.a.load.name, pair)
    for max_load in result.max_loads:
        charts += load.build_search_charts(max_load, search.required_share if search else 1.0)
        charts += load.build_charts([best], slo) if (best := max_load.best_metrics) else []
    return charts + (load.build_charts(result.measured, slo) if result.measured else [])


def build_page(
    result: "LoadResult", slo: Slo | None, search: "MaxLoadSettings | None"
) -> "ReportPage":
    """Return the HTML report. The parameters are those of `build_charts`."""
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
        f"{entry.load.name}: {warning}"
        for entry in _all_metrics(result)
        for warning in entry.warnings
    ]
    tables = [
        (f"Times at {entry.load.name}", output.build_percentile_table(entry))
        for entry in _all_metrics(result)
        if entry.times
    ]
    tables.append(("Definitions", Table(("figure", "meaning"), tuple(METRIC_DEFINITIONS.items()))))
    if result.measured:
        tables.insert(0, ("All loads", output.build_table(result.measured)))
    return report_page.build_page(
        f"Load on {names}", about, lead, build_charts(result, slo, search), tables
    )


def search_verdict(max_load: "MaxLoadResult", search: "MaxLoadSettings | None") -> str:
    """Return the result of a search for the largest load as one sentence."""
    assert search is not None
    unit = "at once" if max_load.kind == "concurrency" else "requests per second"
    slo_text = f"{search.slo} for {search.required_share:.0%} of the requests"
    if max_load.level is None:
        return f"no load meets {slo_text}: not even {max_load.next_level:g} {unit}"
    next_load = (
        "no larger load was tried"
        if max_load.next_level is None
        else f"{max_load.next_level:g} do not"
    )
    interval = (
        f"the limit is between {max_load.low:.3g} and {max_load.high:.3g} (90 %), "
        if max_load.low and max_load.high
        else ""
    )
    return (
        f"{max_load.level:g} {unit} meet {slo_text}; {next_load} "
        f"({interval}{len(max_load.measurements)} measurements)"
    )


def search_caveats(max_load: "MaxLoadResult", search: "MaxLoadSettings | None") -> list[str]:
    """Return sentences about what makes the result of a search unreliable."""
    assert search is not None
    caveats, best = [], max_load.best_metrics
    if max_load.steps > 1:
        caveats.append(
            f"the noise allows steps of {max_load.steps} levels instead of one: another search may "
            "differ by as much; more --requests or a quieter machine would be more precise"
        )
    if (
        max_load.level is not None
        and best
        and best.slo_share is not None
        and best.slo_share < search.required_share
    ):
        caveats.append(
            f"only {best.slo_share:.0%} of the {best.requests} requests at {best.load.name} met the "
            "SLO: the result combines all measurements near it"
        )
    if max_load.drift:
        caveats.append(
            f"the latency of a single user changed by a factor of {max_load.drift:.2f} during the "
            "search: the machine changed, and the result with it"
        )
    return caveats


def _describe_prompts(environment: output.LoadEnvironment) -> str:
    """Describe the prompts that were sent: the mix or file, and the lengths in tokens."""
    shape = environment.lengths
    if environment.mix not in mixes.load_mixes():
        return f"the requests of {environment.mix}, answers of {shape.output_tokens} tokens unless they set it"
    shared = f", {shape.shared_fraction:.0%} of them shared" if shape.shared_fraction else ""
    return f"{environment.mix}, {shape.prompt_tokens} tokens{shared} + {shape.output_tokens}"


def _print_tables(result: "LoadResult", search: "MaxLoadSettings | None", ui: "UI") -> None:
    for environment in result.environments:
        ui.text(f"{environment.model} at {environment.server} · {_describe_prompts(environment)}")
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
    for max_load in result.max_loads:
        search_rows = [
            (
                entry.metrics.load.name,
                str(entry.metrics.answered),
                f"{entry.metrics.slo_share or 0:.0%}",
                output.format_percentile(entry.metrics, "ttft", "p50"),
                output.format_percentile(entry.metrics, "tpot", "p50"),
                "meets SLO" if entry.keeps_limits else "-",
            )
            for entry in max_load.measurements
        ]
        names = ("load", "answered", "within SLO", "TTFT p50", "TPOT p50", "")
        ui.table(names, search_rows, right=names[1:5])
        ui.text(search_verdict(max_load, search))
        for caveat in search_caveats(max_load, search):
            ui.warn(caveat)
        ui.text()
    if len(result.measured) > 1:
        _print_table(output.build_table(result.measured), ui)
        ui.text()
    for entry in _all_metrics(result):
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
    for warning in measured.warnings:
        ui.warn(warning)
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


def _all_metrics(result: "LoadResult") -> list[LoadMetrics]:
    compared = [metrics for pair in result.comparisons for metrics in (pair.a, pair.b)]
    return [
        *result.measured,
        *compared,
        *(best for max_load in result.max_loads if (best := max_load.best_metrics)),
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
