"""`--report` and `--chart`: flags of every command that draws; the path is checked first, the page
written last.
"""

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

Report = Annotated[
    Path | None,
    typer.Option("--report", metavar="FILE", help="Write a page of pictures and tables."),
]
Charts = Annotated[
    bool | None,
    typer.Option("--chart/--no-chart", help="Draw pictures in the terminal; default: only on one."),
]


def check(path: Path | None) -> None:
    """Raise UserError for a page that could not be written, before anything is measured."""
    from llmcli.catalog.partial import check_place

    if path is not None:
        check_place(path)


def show(
    page: "Callable[[], Page]",
    few: "Callable[[], Sequence[Chart]]",
    how: tuple[Path | None, bool | None],
    ui: "UI",
) -> None:
    """Draw and write what was measured; call it when the results have been printed.

    `how` is what --report and --chart said: with --chart all pictures of the page are drawn,
    unasked on a terminal those of the `few` that tell what a table does not. The page is made once,
    and only if it is needed.
    """
    from llmcli.bench.charts import terminal
    from llmcli.bench.charts.page import html
    from llmcli.catalog.partial import write_whole

    path, wanted = how
    made = page() if path is not None or wanted else None
    charts: Sequence[Chart] = made.charts if made and wanted else ()
    if wanted is None and not ui.json and sys.stdout.isatty():
        charts = [chart for chart in few() if terminal.telling(chart)]
    for chart in charts:
        ui.text()
        ui.drawing(partial(terminal.text, chart))
    if path is not None and made:
        write_whole(path, html(made).encode())
        ui.note(f"report: {path}")
