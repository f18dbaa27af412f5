"""Row charts (bars or marks) as SVG. The name of a row is to its left, or above it in a narrow
picture.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from llmcli.charts import svg_frame
from llmcli.charts.chart import ChartRow, ReferenceLine, RowChart
from llmcli.charts.label_layout import LINE_PIXELS, shorten_to_width, text_width
from llmcli.charts.markup import Markup, build_element, join_markup
from llmcli.charts.scale import Scale, axis_limits, format_number
from llmcli.charts.svg_frame import GAP_PIXELS, Frame, draw_line, draw_mark, draw_text

# heights in pixels: of a row, of a row with its name above it, and of a bar
ROW_PIXELS, STACKED_ROW_PIXELS, BAR_PIXELS = 28.0, 46.0, 14.0


@dataclass(frozen=True, slots=True)
class RowLayout:
    """The positions of rows in a picture. `labels_beside`: names are left of the rows and notes
    after the values; if False, both are above the row.
    """

    area: Frame
    scale: Scale
    labels_beside: bool
    ident: str

    def row_center(self, number: int) -> float:
        """Return the y coordinate of the values of row `number`."""
        return self.area.y_min + (
            ROW_PIXELS * number + 16 if self.labels_beside else STACKED_ROW_PIXELS * number + 32
        )


def draw_rows(chart: RowChart, width_pixels: float, ident: str, css_class: str) -> Markup:
    """Draw the chart as SVG, `width_pixels` wide."""
    names = chart.value_names if len(chart.value_names) > 1 else ()
    samples = [
        draw_mark(n, 11, 0) if chart.draws_marks else _swatch(n, ident) for n in range(len(names))
    ]
    key, top = svg_frame.draw_legend(names, width_pixels, 2, samples)
    layout = _layout(chart, width_pixels, top, ident)
    area = layout.area
    pieces = (
        [svg_frame.hatch_patterns(len(chart.value_names), ident)] if not chart.draws_marks else []
    )
    pieces += [key, svg_frame.draw_x_axis(layout.scale, area, chart.axis.title)]
    labels = []
    for number, row in enumerate(chart.rows):
        y = layout.row_center(number)
        values, end = (
            _dots(row, chart.value_names, layout, y)
            if chart.draws_marks
            else _bar(row, chart.value_names, layout, y)
        )
        pieces.append(values)
        labels += _words(row, layout, y, end)
    # The labels are placed from left to right, each one lower, so that no line crosses another
    # line's label.
    for number, rule in enumerate(sorted(chart.reference_lines, key=lambda rule: rule.position)):
        pieces.append(_rule(rule, layout, top + LINE_PIXELS * (number + 1) - 3))
    pieces += labels
    return svg_frame.build_svg(
        chart.title,
        chart.description,
        width_pixels,
        area.y_max + 2 * LINE_PIXELS + GAP_PIXELS,
        ident,
        css_class,
        *pieces,
    )


def _words(row: ChartRow, place: RowLayout, y: float, end: float) -> list[Markup]:
    """Draw the name and the note of a row. Lines that pass there are drawn below them."""
    wide = place.area.width
    if place.labels_beside:
        words = [draw_text(row.label, place.area.x_min - 8, y + 4, "end", "label")]
        return words + (
            [draw_text(row.note, end + 8, y + 4, css_class="label")] if row.note else []
        )
    words = [
        draw_text(
            shorten_to_width(row.label, wide - text_width(row.note) - GAP_PIXELS),
            1.0,
            y - 13,
            css_class="label",
        )
    ]
    return words + ([draw_text(row.note, wide - 1, y - 13, "end", "label")] if row.note else [])


def _layout(chart: RowChart, wide: float, top: float, ident: str) -> RowLayout:
    label, note = (
        max(text_width(row.label) for row in chart.rows),
        max(text_width(row.note) for row in chart.rows),
    )
    beside = label <= 0.35 * wide and note <= 0.35 * wide and label + note <= 0.5 * wide
    left = label + 16 if beside else 6.0
    right = wide - (note + 20 if beside and note else 14)
    top += LINE_PIXELS * len(chart.reference_lines)
    bottom = top + (ROW_PIXELS if beside else STACKED_ROW_PIXELS) * len(chart.rows) + 4
    low, high = axis_limits(chart.axis_values, chart.axis.is_log, chart.axis.from_zero)
    return RowLayout(
        Frame(wide, left, top, right, bottom),
        Scale(low, high, left, right, chart.axis.is_log),
        beside,
        ident,
    )


def _bar(row: ChartRow, names: Sequence[str], place: RowLayout, y: float) -> tuple[Markup, float]:
    """Draw the parts of a stacked bar. Returns the markup, and the x coordinate of the bar's end."""
    pieces, total = [], 0.0
    for named in row.values:
        start, end = place.scale(total), place.scale(total + named.value)
        says = build_element("title", f"{row.label}, {named.name}: {format_number(named.value)}")
        fill = f"url(#{place.ident}-{names.index(named.name)})"
        box = {
            "x": start,
            "y": y - BAR_PIXELS / 2,
            "width": max(end - start, 0.75),
            "height": BAR_PIXELS,
        }
        pieces.append(build_element("rect", says, class_="part", fill=fill, **box))
        total += named.value
    end = place.scale(total)
    if row.value_range:
        pieces.append(_span(row.value_range, place, y))
        end = max(end, place.scale(row.value_range[1]))
    return join_markup(*pieces), end


def _dots(row: ChartRow, names: Sequence[str], place: RowLayout, y: float) -> tuple[Markup, float]:
    """Draw one mark for each value, and a horizontal line: the range of the row or, without one,
    from the smallest to the largest value.

    Returns the markup, and the x coordinate where it ends.
    """
    mark_xs = [place.scale(named.value) for named in row.values]
    pieces = [_span(row.value_range, place, y)] if row.value_range else []
    if mark_xs and not row.value_range:
        pieces.append(draw_line(min(mark_xs), y, max(mark_xs), y, "stem"))
    for named, x in zip(row.values, mark_xs, strict=True):
        pieces.append(
            draw_mark(
                names.index(named.name),
                x,
                y,
                f"{row.label}, {named.name}: {format_number(named.value)}",
            )
        )
    return join_markup(*pieces), max(
        [*mark_xs, *(place.scale(end) for end in row.value_range or ())], default=place.area.x_min
    )


def _span(span: tuple[float, float], place: RowLayout, y: float) -> Markup:
    """Draw a range as a horizontal line with a cap at both ends."""
    low, high = place.scale(span[0]), place.scale(span[1])
    path = f"M{low:.2f} {y - 4:.2f}v8m0 -4H{high:.2f}m0 -4v8"
    return build_element("path", class_="span", d=path)


def _rule(rule: ReferenceLine, place: RowLayout, y: float) -> Markup:
    """Draw a vertical reference line. Its label is above the rows, on the left or the right of the
    line.
    """
    line_x, width_pixels = place.scale(rule.position), place.area.width
    label_left = line_x + 5 + text_width(rule.label) > width_pixels and line_x > width_pixels / 2
    words = shorten_to_width(rule.label, (line_x if label_left else width_pixels - line_x) - 6)
    path = f"M{line_x:.2f} {y - 9:.2f}V{place.area.y_max:.2f}"
    return join_markup(
        # a background, because the bars below may be as dark as the line
        build_element("path", class_="rule under", d=path),
        build_element("path", class_="rule", d=path),
        draw_text(
            words,
            line_x - 5 if label_left else line_x + 5,
            y,
            "end" if label_left else None,
            "label",
        ),
    )


def _swatch(number: int, ident: str) -> Markup:
    """Draw the legend sample of a part of a bar."""
    return build_element(
        "rect", class_="part", fill=f"url(#{ident}-{number})", x=2, y=-6, width=18, height=12
    )
