"""Draws a RowChart, whose rows are bars or lines of marks, as SVG. The label of a row is on its
left or, if there is too little space, above it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from llmcli.charts import svg_frame
from llmcli.charts.chart import ChartRow, ReferenceLine, RowChart
from llmcli.charts.label_layout import LINE_PIXELS, shorten_to_width, text_width
from llmcli.charts.markup import Markup, build_element, join_markup
from llmcli.charts.scale import Scale, axis_limits, format_number
from llmcli.charts.svg_frame import GAP_PIXELS, Frame, draw_line, draw_mark, draw_text

# Heights in pixels: of a row with its label on the left, of a row with its label above, of a bar.
ROW_PIXELS, STACKED_ROW_PIXELS, BAR_PIXELS = 28.0, 46.0, 14.0


@dataclass(frozen=True, slots=True)
class RowLayout:
    """The positions of the rows in a picture.

    `area`: the area of the bars or marks; `scale`: maps values to x coordinates. `labels_beside`:
    labels are left of the rows and notes right of them; if False, both are above the row. `ident`:
    prefix of the ids in the SVG.
    """

    area: Frame
    scale: Scale
    labels_beside: bool
    ident: str

    def row_center(self, number: int) -> float:
        """Return the y coordinate of the center of the bar or the marks of row `number`."""
        return self.area.y_min + (
            ROW_PIXELS * number + 16 if self.labels_beside else STACKED_ROW_PIXELS * number + 32
        )


def draw_rows(chart: RowChart, width_pixels: float, ident: str, css_class: str) -> Markup:
    """Return a RowChart as an SVG element of the given width. For `ident` and `css_class` see
    svg.draw_chart.
    """
    names = chart.value_names if len(chart.value_names) > 1 else ()
    samples = [
        draw_mark(n, 11, 0) if chart.draws_marks else _draw_sample(n, ident)
        for n in range(len(names))
    ]
    legend, top = svg_frame.draw_legend(names, width_pixels, 2, samples)
    layout = _layout(chart, width_pixels, top, ident)
    area = layout.area
    elements = (
        [svg_frame.hatch_patterns(len(chart.value_names), ident)] if not chart.draws_marks else []
    )
    elements += [legend, svg_frame.draw_x_axis(layout.scale, area, chart.axis.title)]
    labels = []
    for number, row in enumerate(chart.rows):
        y = layout.row_center(number)
        drawn_row, end = (
            _draw_marks(row, chart.value_names, layout, y)
            if chart.draws_marks
            else _draw_bar(row, chart.value_names, layout, y)
        )
        elements.append(drawn_row)
        labels += _draw_row_labels(row, layout, y, end)
    # From left to right, each line's label is one line of text lower, so that no reference line
    # crosses the label of another.
    for number, rule in enumerate(sorted(chart.reference_lines, key=lambda rule: rule.position)):
        elements.append(_draw_reference_line(rule, layout, top + LINE_PIXELS * (number + 1) - 3))
    elements += labels
    return svg_frame.build_svg(
        chart.title,
        chart.description,
        width_pixels,
        area.y_max + 2 * LINE_PIXELS + GAP_PIXELS,
        ident,
        css_class,
        *elements,
    )


def _draw_row_labels(row: ChartRow, layout: RowLayout, y: float, end: float) -> list[Markup]:
    """Draw the label and the note of a row whose center has the y coordinate `y`. `end`: x
    coordinate at which the row's bar or marks end. The texts must come after all lines in the SVG,
    so that they are drawn on top of these.
    """
    width = layout.area.width
    if layout.labels_beside:
        texts = [draw_text(row.label, layout.area.x_min - 8, y + 4, "end", "label")]
        return texts + (
            [draw_text(row.note, end + 8, y + 4, css_class="label")] if row.note else []
        )
    texts = [
        draw_text(
            shorten_to_width(row.label, width - text_width(row.note) - GAP_PIXELS),
            1.0,
            y - 13,
            css_class="label",
        )
    ]
    return texts + ([draw_text(row.note, width - 1, y - 13, "end", "label")] if row.note else [])


def _layout(chart: RowChart, width: float, top: float, ident: str) -> RowLayout:
    """Return the layout of a chart's rows in a picture of this width, below the y coordinate
    `top`. Labels and notes are beside the rows if they leave half of the width for the values.
    """
    label, note = (
        max(text_width(row.label) for row in chart.rows),
        max(text_width(row.note) for row in chart.rows),
    )
    labels_beside = label <= 0.35 * width and note <= 0.35 * width and label + note <= 0.5 * width
    left = label + 16 if labels_beside else 6.0
    right = width - (note + 20 if labels_beside and note else 14)
    top += LINE_PIXELS * len(chart.reference_lines)
    row_height = ROW_PIXELS if labels_beside else STACKED_ROW_PIXELS
    bottom = top + row_height * len(chart.rows) + 4
    low, high = axis_limits(chart.axis_values, chart.axis.is_log, chart.axis.from_zero)
    return RowLayout(
        Frame(width, left, top, right, bottom),
        Scale(low, high, left, right, chart.axis.is_log),
        labels_beside,
        ident,
    )


def _draw_bar(
    row: ChartRow, names: Sequence[str], layout: RowLayout, y: float
) -> tuple[Markup, float]:
    """Draw a row as a stacked bar, with its error bar. `names`: the chart's value names, whose
    order determines the fill patterns. Return the markup, and the x coordinate where the bar ends.
    """
    elements, total = [], 0.0
    for named in row.values:
        start, end = layout.scale(total), layout.scale(total + named.value)
        tooltip = build_element("title", f"{row.label}, {named.name}: {format_number(named.value)}")
        fill = f"url(#{layout.ident}-{names.index(named.name)})"
        box = {
            "x": start,
            "y": y - BAR_PIXELS / 2,
            "width": max(end - start, 0.75),
            "height": BAR_PIXELS,
        }
        elements.append(build_element("rect", tooltip, class_="part", fill=fill, **box))
        total += named.value
    end = layout.scale(total)
    if row.value_range:
        elements.append(_draw_range(row.value_range, layout, y))
        end = max(end, layout.scale(row.value_range[1]))
    return join_markup(*elements), end


def _draw_marks(
    row: ChartRow, names: Sequence[str], layout: RowLayout, y: float
) -> tuple[Markup, float]:
    """Draw a row as one mark for each value on a horizontal line. The line is the row's error bar
    or, if the row has none, connects the smallest and the largest value. `names`: the chart's value
    names, whose order determines the marks.

    Return the markup, and the x coordinate where the row ends.
    """
    mark_xs = [layout.scale(named.value) for named in row.values]
    elements = [_draw_range(row.value_range, layout, y)] if row.value_range else []
    if mark_xs and not row.value_range:
        elements.append(draw_line(min(mark_xs), y, max(mark_xs), y, "stem"))
    for named, x in zip(row.values, mark_xs, strict=True):
        elements.append(
            draw_mark(
                names.index(named.name),
                x,
                y,
                f"{row.label}, {named.name}: {format_number(named.value)}",
            )
        )
    return join_markup(*elements), max(
        [*mark_xs, *(layout.scale(end) for end in row.value_range or ())], default=layout.area.x_min
    )


def _draw_range(value_range: tuple[float, float], layout: RowLayout, y: float) -> Markup:
    """Draw an error bar: a horizontal line with a short vertical line at both ends."""
    low, high = layout.scale(value_range[0]), layout.scale(value_range[1])
    path = f"M{low:.2f} {y - 4:.2f}v8m0 -4H{high:.2f}m0 -4v8"
    return build_element("path", class_="span", d=path)


def _draw_reference_line(rule: ReferenceLine, layout: RowLayout, y: float) -> Markup:
    """Draw a vertical reference line across all rows. Its label is above the rows at the y
    coordinate `y`, on the side of the line that has more space.
    """
    line_x, width_pixels = layout.scale(rule.position), layout.area.width
    label_left = line_x + 5 + text_width(rule.label) > width_pixels and line_x > width_pixels / 2
    label = shorten_to_width(rule.label, (line_x if label_left else width_pixels - line_x) - 6)
    path = f"M{line_x:.2f} {y - 9:.2f}V{layout.area.y_max:.2f}"
    return join_markup(
        # A wider line in the color of the page behind the dashed line makes it visible on bars.
        build_element("path", class_="rule under", d=path),
        build_element("path", class_="rule", d=path),
        draw_text(
            label,
            line_x - 5 if label_left else line_x + 5,
            y,
            "end" if label_left else None,
            "label",
        ),
    )


def _draw_sample(number: int, ident: str) -> Markup:
    """Draw the sample in the legend for the bar segments of value name `number`."""
    return build_element(
        "rect", class_="part", fill=f"url(#{ident}-{number})", x=2, y=-6, width=18, height=12
    )
