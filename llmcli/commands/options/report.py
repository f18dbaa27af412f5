"""`--report` and `--chart`, the options of every command that has charts.

The path of the report is checked before anything is measured, and the report is written at the end.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from llmcli.commands.command_line import panels
from llmcli.commands.options.groups import option_group

if TYPE_CHECKING:
    from llmcli.charts.chart import Chart
    from llmcli.charts.html_page import ReportPage
    from llmcli.ui import UI


@dataclass(frozen=True, slots=True)
class ReportSettings:
    """The path of the HTML report, and whether charts are drawn in the terminal.

    `report_file`: None: write no report. `chart`: True: draw all charts; False: draw none; None:
    draw the default charts if stdout is a terminal.
    """

    report_file: Path | None = None
    chart: bool | None = None

    def check_path(self) -> None:
        """Raise UserError if the report cannot be written."""
        from llmcli.atomic_files import require_writable

        if self.report_file is not None:
            require_writable(self.report_file)


ReportOptions = Annotated[
    ReportSettings,
    option_group(
        panels.OUTPUT,
        report_file=typer.Option(
            "--report", metavar="FILE", help="Write a page of charts and tables."
        ),
        chart=typer.Option(
            "--chart/--no-chart",
            help="Draw charts in the terminal; default: only if stdout is a terminal.",
        ),
    ),
]


def show_report(
    build_page: "Callable[[], ReportPage]",
    build_default_charts: "Callable[[], Sequence[Chart]]",
    settings: ReportSettings,
    ui: "UI",
) -> None:
    """Draw the charts in the terminal, and write the HTML report. Call it after the results were
    printed.

    `build_page` builds the report. It is called at most once, and only for --report or --chart;
    --chart draws all charts of the report. `build_default_charts` builds the charts for a terminal
    without --chart. Charts that show no more than the printed table are skipped.
    """
    from llmcli.atomic_files import write_atomically
    from llmcli.charts import terminal_chart
    from llmcli.charts.html_page import render_html

    path, draw_all = settings.report_file, settings.chart
    report_page = build_page() if path is not None or draw_all else None
    charts: Sequence[Chart] = report_page.charts if report_page and draw_all else ()
    if draw_all is None and not ui.json and sys.stdout.isatty():
        charts = [
            chart for chart in build_default_charts() if terminal_chart.compares_values(chart)
        ]
    for chart in charts:
        ui.text()
        ui.print_drawing(partial(terminal_chart.render_text, chart))
    if path is not None and report_page:
        write_atomically(path, render_html(report_page).encode())
        ui.note(f"report: {path}")
