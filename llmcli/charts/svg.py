"""Draws any chart as an SVG picture. An HTML page contains each chart twice: as a wide picture for
screens and print, and as a narrow picture for phones.
"""

from llmcli.charts import svg_bars, svg_plot
from llmcli.charts.chart import Chart, Plot
from llmcli.charts.markup import Markup

WIDE_PIXELS, NARROW_PIXELS = 720, 340  # widths of the two pictures


def draw_chart(
    chart: Chart, width_pixels: float = WIDE_PIXELS, ident: str = "chart", css_class: str = ""
) -> Markup:
    """Return a chart as an SVG element of the given width. The height depends on the content.

    `ident`: prefix of the ids in the SVG, which must be unique on the page. `css_class`: further
    CSS class of the SVG element.
    """
    return (
        svg_plot.draw_plot(chart, width_pixels, ident, css_class)
        if isinstance(chart, Plot)
        else svg_bars.draw_rows(chart, width_pixels, ident, css_class)
    )
