"""Draws a Plot, a chart with two numeric axes, as SVG: lines, marks, and labels where there is
space for them.
"""

from llmcli.charts import svg_frame
from llmcli.charts.chart import Plot, ReferenceLine, Series
from llmcli.charts.label_layout import LINE_PIXELS, Box, LabelLayout, shorten_to_width, text_width
from llmcli.charts.markup import Markup, build_element, join_markup
from llmcli.charts.scale import Scale, axis_limits, format_number, format_ticks
from llmcli.charts.svg_frame import (
    GAP_PIXELS,
    LINE_DASHES,
    Frame,
    color_class,
    draw_mark,
    draw_text,
)


def draw_plot(plot: Plot, width_pixels: float, ident: str, css_class: str) -> Markup:
    """Return a Plot as an SVG element of the given width. For `ident` and `css_class` see
    svg.draw_chart.
    """
    points = [point for series in plot.series for point in series.points]
    elements = [draw_text(shorten_to_width(plot.y.title, width_pixels), 0, 12, css_class="title")]
    legend_entries = [
        (number, series)
        for number, series in enumerate(plot.series)
        if len(plot.series) > 1 and series.name
    ]
    legend, top = svg_frame.draw_legend(
        [series.name for _, series in legend_entries],
        width_pixels,
        LINE_PIXELS + 4,
        [_draw_sample(*series) for series in legend_entries],
    )
    plot_height = min(340.0, max(220.0, width_pixels * 0.5))
    (x_low, x_high), (y_low, y_high) = (
        axis_limits(
            [p.x for p in points] + [rule.position for rule in plot.reference_lines], plot.x.is_log
        ),
        axis_limits([p.y for p in points], plot.y.is_log),
    )
    y = Scale(y_low, y_high, top + GAP_PIXELS + plot_height, top + GAP_PIXELS, plot.y.is_log)
    y_ticks = y.ticks(6)
    left = max(text_width(label) for label in format_ticks(y_ticks)) + GAP_PIXELS
    area = Frame(
        width_pixels, left, top + GAP_PIXELS, width_pixels - 12, top + GAP_PIXELS + plot_height
    )
    x = Scale(x_low, x_high, area.x_min, area.x_max, plot.x.is_log)
    for value, label in zip(y_ticks, format_ticks(y_ticks), strict=True):
        elements.append(svg_frame.draw_line(area.x_min, y(value), area.x_max, y(value), "grid"))
        elements.append(draw_text(label, area.x_min - 6, y(value) + 4, "end", "tick"))
    layout = LabelLayout(Box(area.x_min + 2, area.y_min + 2, area.x_max, area.y_max - 2))
    elements += [legend, svg_frame.draw_x_axis(x, area, plot.x.title)]
    elements += [_draw_reference_line(rule, x, area, layout) for rule in plot.reference_lines]
    elements += [
        _draw_series(number, series, x, y, layout) for number, series in enumerate(plot.series)
    ]
    elements += [_draw_labels(series, x, y, layout) for series in plot.series]
    return svg_frame.build_svg(
        plot.title,
        plot.description,
        width_pixels,
        area.y_max + 2 * LINE_PIXELS + GAP_PIXELS,
        ident,
        css_class,
        *elements,
    )


def _draw_sample(number: int, series: Series) -> Markup:
    """Draw the sample in the legend for series `number`: its line with its mark on it."""
    return join_markup(
        build_element(
            "path",
            class_=f"line {color_class(number)}",
            d="M0 0H22",
            stroke_dasharray=LINE_DASHES[number % len(LINE_DASHES)],
        )
        if series.line
        else Markup(),
        draw_mark(number, 11, 0) if series.marks else Markup(),
    )


def _draw_series(number: int, series: Series, x: Scale, y: Scale, layout: LabelLayout) -> Markup:
    """Draw the line and the marks of series `number`, and add them to `layout`, so that labels
    avoid them. `x`, `y`: the scales of the two axes.
    """
    positions = [(x(point.x), y(point.y)) for point in series.points]
    elements = []
    if series.line and len(positions) > 1:
        layout.add_line(positions)
        path = "M" + "L".join(f"{px:.2f} {py:.2f}" for px, py in positions)
        dashes = LINE_DASHES[number % len(LINE_DASHES)]
        elements.append(
            build_element(
                "path", class_=f"line {color_class(number)}", d=path, stroke_dasharray=dashes
            )
        )
    if series.marks:
        for point, (px, py) in zip(series.points, positions, strict=True):
            tooltip = (
                point.full_label
                or f"{series.name}: {format_number(point.x)}, {format_number(point.y)}"
            )
            elements.append(draw_mark(number, px, py, tooltip))
            layout.add_mark(px, py)
    return join_markup(*elements)


def _draw_labels(series: Series, x: Scale, y: Scale, layout: LabelLayout) -> Markup:
    """Draw the labels of a series' points. If there is no space for a point's label with its note,
    draw the label alone; if there is no space for that, draw nothing.
    """
    elements = []
    for point in series.points:
        px, py = x(point.x), y(point.y)
        candidates = (
            (text, layout.place_label(text, px, py))
            for text in dict.fromkeys((point.full_label, point.label))
            if text
        )
        text, spot = next(((text, spot) for text, spot in candidates if spot), ("", None))
        if spot:
            box = spot.box
            if spot.needs_leader:
                nearest = min(max(px, box.x_min), box.x_max), min(max(py, box.y_min), box.y_max)
                elements.append(svg_frame.draw_line(px, py, *nearest, "lead"))
            elements.append(draw_text(text, box.x_min, box.y_max - 4, css_class="label"))
    return join_markup(*elements)


def _draw_reference_line(rule: ReferenceLine, x: Scale, area: Frame, layout: LabelLayout) -> Markup:
    """Draw a vertical reference line. Its label is near the top, below labels that are already
    there, on the right of the line or, if it does not fit there, on the left.
    """
    line_x = x(rule.position)
    layout.add_line([(line_x, area.y_min), (line_x, area.y_max)])
    label = shorten_to_width(rule.label, max(area.x_max - line_x, line_x - area.x_min) - 6)
    label_width = text_width(label)
    left = line_x + 5 if line_x + 5 + label_width <= area.x_max else line_x - 5 - label_width
    y = area.y_min + 14
    while (
        any(
            Box(left, y - 12, left + label_width, y + 4).overlap_area(occupied)
            for occupied in layout.occupied
        )
        and y < area.y_max - LINE_PIXELS
    ):
        y += LINE_PIXELS
    layout.occupied.append(Box(left, y - 12, left + label_width, y + 4))
    return join_markup(
        svg_frame.draw_line(line_x, area.y_min, line_x, area.y_max, "rule"),
        draw_text(label, left, y, css_class="label"),
    )
