"""Charts as SVG, in a wide version for screens and print and a narrow version for phones."""

from llmcli.bench.charts import plot, rows
from llmcli.bench.charts.chart import Chart, Plot
from llmcli.bench.charts.markup import Markup

WIDE, SLIM = 720, 340  # pixels


def svg(chart: Chart, wide: float = WIDE, ident: str = "chart", kind: str = "") -> Markup:
    """Draw a chart `wide` pixels wide. `ident` must be unique on the page; `kind` is an additional
    CSS class.
    """
    return (
        plot.draw(chart, wide, ident, kind)
        if isinstance(chart, Plot)
        else rows.draw(chart, wide, ident, kind)
    )
