"""The HTML report of `llmcli bench spec`."""

from typing import TYPE_CHECKING

from llmcli.bench import report_page
from llmcli.bench.plots import drafts
from llmcli.bench.spec import output
from llmcli.charts.chart import Table
from llmcli.commands.options.report import ReportSettings, show_report

if TYPE_CHECKING:
    from llmcli.bench.spec.run import SpecResult
    from llmcli.charts.html_page import ReportPage
    from llmcli.ui import UI


def print_result(result: "SpecResult", reporting: ReportSettings, ui: "UI") -> None:
    """Print the result as text or JSON, then draw its charts and write the report."""
    if ui.json:
        ui.result(output.build_document(result))
    else:
        output.print_benchmark(result, ui)
    show_report(
        lambda: build_page(result), lambda: drafts.build_charts(result.methods)[:1], reporting, ui
    )


def build_page(result: "SpecResult") -> "ReportPage":
    """Return the HTML report."""
    draft = f", with the drafts of {result.draft_path.name}" if result.draft_path else ""
    about = (
        f"Greedy answers of up to {result.n_tokens} tokens in interleaved pairs{draft}. "
        f"KV cache {result.options.cache_type_k}, {result.options.cache_type_v}; "
        f"threads: {result.options.threads}."
    )
    table = Table(output.COLUMNS, tuple(output.table_rows(result)), frozenset((2, 3, 4, 5, 7)))
    return report_page.build_page(
        f"Drafts of {result.name}",
        about,
        output.verdicts(result),
        drafts.build_charts(result.methods),
        [("All results", table)],
    )
