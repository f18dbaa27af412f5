"""Charts as SVG, in a wide version for screens and print and a narrow version for phones."""

from llmcli.charts import svg_bars, svg_plot
from llmcli.charts.chart import Chart, Plot
from llmcli.charts.markup import Markup

WIDE, SLIM = 720, 340  # pixels


def svg(chart: Chart, wide: float = WIDE, ident: str = "chart", kind: str = "") -> Markup:
    """Draw a chart `wide` pixels wide. `ident` must be unique on the page; `kind` is an additional
    CSS class.
    """
    return (
        svg_plot.draw(chart, wide, ident, kind)
        if isinstance(chart, Plot)
        else svg_bars.draw(chart, wide, ident, kind)
    )
