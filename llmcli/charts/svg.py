"""Charts as SVG pictures: wide ones for screens and print, narrow ones for phones."""

from llmcli.charts import svg_bars, svg_plot
from llmcli.charts.chart import Chart, Plot
from llmcli.charts.markup import Markup

WIDE_PIXELS, NARROW_PIXELS = 720, 340  # widths of a picture


def draw_chart(
    chart: Chart, width_pixels: float = WIDE_PIXELS, ident: str = "chart", css_class: str = ""
) -> Markup:
    """Draw a chart `width_pixels` wide. `ident` must be unique on the page; `css_class` is an
    additional class.
    """
    return (
        svg_plot.draw_plot(chart, width_pixels, ident, css_class)
        if isinstance(chart, Plot)
        else svg_bars.draw_rows(chart, width_pixels, ident, css_class)
    )
