"""`--report` and `--chart`, the options of every command that draws.

The report path is checked before anything is measured; the page is written at the end.
"""

import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from llmcli.charts.chart import Chart
    from llmcli.charts.html_page import Page
    from llmcli.ui import UI

ReportFile = Annotated[
    Path | None,
    typer.Option("--report", metavar="FILE", help="Write a page of charts and tables."),
]
ChartSwitch = Annotated[
    bool | None,
    typer.Option(
        "--chart/--no-chart",
        help="Draw charts in the terminal; default: only if stdout is a terminal.",
    ),
]


def check_report_path(path: Path | None) -> None:
    """Raise UserError if the report page could not be written to `path`."""
    from llmcli.atomic_files import check_place

    if path is not None:
        check_place(path)


def show_report(
    build_page: "Callable[[], Page]",
    build_default_charts: "Callable[[], Sequence[Chart]]",
    report_and_chart: tuple[Path | None, bool | None],
    ui: "UI",
) -> None:
    """Draw the charts and write the report page; call it after the results were printed.

    `build_page` builds the page, at most once and only if needed. `build_default_charts` builds the
    charts that are drawn by default on a terminal, if they show more than a table.
    `report_and_chart` holds the values of --report and --chart: with --chart, all charts of the
    page are drawn.
    """
    from llmcli.atomic_files import write_whole
    from llmcli.charts import terminal_chart
    from llmcli.charts.html_page import html

    path, draw_all = report_and_chart
    report_page = build_page() if path is not None or draw_all else None
    charts: Sequence[Chart] = report_page.charts if report_page and draw_all else ()
    if draw_all is None and not ui.json and sys.stdout.isatty():
        charts = [chart for chart in build_default_charts() if terminal_chart.telling(chart)]
    for chart in charts:
        ui.text()
        ui.drawing(partial(terminal_chart.text, chart))
    if path is not None and report_page:
        write_whole(path, html(report_page).encode())
        ui.note(f"report: {path}")
