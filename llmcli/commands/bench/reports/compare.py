"""The charts and the HTML report of `llmcli bench compare`: the ratio of each test with its
interval, and the speeds of A and B.
"""

import math
from statistics import median
from typing import TYPE_CHECKING

from llmcli.bench import report_page
from llmcli.bench.compare import run
from llmcli.bench.plots import pairs
from llmcli.bench.plots.pairs import SpeedRatio
from llmcli.charts.chart import Axis, Chart, ChartRow, NamedValue, RowChart
from llmcli.charts.scale import format_number
from llmcli.commands.options.report import ReportSettings, show_report

if TYPE_CHECKING:
    from llmcli.bench.compare.run import ComparisonResult
    from llmcli.bench.statistics.paired_test import Comparison
    from llmcli.charts.html_page import ReportPage
    from llmcli.ui import UI


def print_result(result: "ComparisonResult", reporting: ReportSettings, ui: "UI") -> None:
    """Print the comparison as text or JSON, then draw its charts and write the report."""
    if ui.json:
        ui.result(run.build_document(result))
    else:
        run.print_comparison(result, ui)
    show_report(lambda: build_page(result), lambda: build_charts(result)[:1], reporting, ui)


def build_charts(result: "ComparisonResult") -> list[Chart]:
    """Return two charts: the ratios B / A, and the speeds in tokens per second."""
    named_comparisons = list(zip(result.tests, result.comparisons, strict=True))
    ratios = [
        SpeedRatio(
            name, comparison.ratio, comparison.low, comparison.high, _ratio_label(comparison)
        )
        for name, comparison in named_comparisons
    ]
    n_different = sum(comparison.differs for comparison in result.comparisons)
    confidence_text = f"{result.design.confidence:.4g}".rstrip("0")
    caption = (
        f"{n_different} of {len(ratios)} differences are larger than the noise; "
        f"all intervals are correct with probability {confidence_text}."
    )
    rows = [
        ChartRow(
            f"{name}, {side}",
            (NamedValue("tokens per second", median(rates)),),
            format_number(median(rates)),
            _whisker(rates),
        )
        for name, comparison in named_comparisons
        for side, rates in (("A", comparison.a), ("B", comparison.b))
    ]
    speed_caption = "Median of each side; whiskers span from the slowest tenth to the fastest."
    return [
        pairs.build_chart("B relative to A", caption, "B / A", ratios),
        RowChart("Speed", speed_caption, Axis("tokens per second"), tuple(rows)),
    ]


def _ratio_label(comparison: "Comparison") -> str:
    """Return a label for a chart row: the ratio, and whether B is faster."""
    if math.isinf(comparison.resolution):
        return "too few pairs"
    return f"{comparison.ratio:.3f}" + (
        ", no difference"
        if not comparison.differs
        else ", faster"
        if comparison.ratio > 1
        else ", slower"
    )


def build_page(result: "ComparisonResult") -> "ReportPage":
    """Return the HTML report."""
    method_note = (
        "Measured in pairs, in random order."
        if result.is_interleaved
        else "Saved runs: they were not interleaved."
    )
    lead = [
        f"{name}: {comparison.describe()}"
        for name, comparison in zip(result.tests, result.comparisons, strict=True)
    ]
    about = f"A is {result.a.path}, B {result.b.path}. {method_note}"
    return report_page.build_page(
        f"{result.a.label} or {result.b.label}", about, lead, build_charts(result)
    )


def _whisker(rates: tuple[float, ...]) -> tuple[float, float] | None:
    """Return the 10th and the 90th percentile of the rates, for the whisker of a chart row. Returns
    None if there is only one rate.
    """
    ordered, n_tenth = sorted(rates), len(rates) // 10
    return (ordered[n_tenth], ordered[-1 - n_tenth]) if len(ordered) > 1 else None
