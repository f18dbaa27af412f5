"""`--report` and `--chart`: flags of every command that draws; the path is checked first, the page written last."""

import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from llmcli.bench.charts.chart import Chart
    from llmcli.bench.charts.page import Page
    from llmcli.ui import UI

Report = Annotated[Path | None, typer.Option("--report", metavar="FILE", help="Write a page of pictures and tables.")]
Charts = Annotated[
    bool | None, typer.Option("--chart/--no-chart", help="Draw pictures in the terminal; default: only on one.")
]


def check(path: Path | None) -> None:
    """Raise UserError for a page that could not be written, before anything is measured."""
    from llmcli.catalog.partial import check_place

    if path is not None:
        check_place(path)


def write(path: Path | None, page: "Callable[[], Page]", ui: "UI") -> None:
    """Write the page, whole or not at all, and say so; call it when the results have been printed."""
    from llmcli.bench.charts.page import html
    from llmcli.catalog.partial import write_whole

    if path is not None:
        write_whole(path, html(page()).encode())
        ui.note(f"report: {path}")


def draw(charts: "Sequence[Chart]", wanted: bool | None, ui: "UI") -> None:
    """Draw charts below one another: all if `wanted`, else on a terminal those that tell what a table does not."""
    from llmcli.bench.charts import terminal

    if wanted is None:
        charts = [chart for chart in charts if not ui.json and sys.stdout.isatty() and terminal.telling(chart)]
    for chart in charts if wanted is not False else ():
        ui.text()
        ui.drawing(partial(terminal.text, chart))
