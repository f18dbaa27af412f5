"""Bar charts and dot rows as SVG. Names are placed left of the rows, or above them in a narrow
picture.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from llmcli.charts import svg_frame
from llmcli.charts.chart import Row, Rows, Rule
from llmcli.charts.label_layout import LINE, cut, width
from llmcli.charts.markup import Markup, element, join
from llmcli.charts.scale import Scale, figure, limits
from llmcli.charts.svg_frame import GAP, Frame, line, mark, text

# pixels: height of a row, of a row with its name above, and of a bar
BESIDE, ABOVE, THICK = 28.0, 46.0, 14.0


@dataclass(frozen=True, slots=True)
class Layout:
    """Position of the rows. `labels_beside`: names left of the rows and notes after the values;
    otherwise both above the row.
    """

    area: Frame
    scale: Scale
    beside: bool
    ident: str

    def middle(self, number: int) -> float:
        """Return the y coordinate of a row's values."""
        return self.area.top + (BESIDE * number + 16 if self.beside else ABOVE * number + 32)


def draw(chart: Rows, wide: float, ident: str, kind: str) -> Markup:
    """Draw the chart as SVG, `wide` pixels wide."""
    names = chart.names if len(chart.names) > 1 else ()
    samples = [mark(n, 11, 0) if chart.dots else _swatch(n, ident) for n in range(len(names))]
    key, top = svg_frame.legend(names, wide, 2, samples)
    layout = _layout(chart, wide, top, ident)
    area = layout.area
    pieces = [svg_frame.hatches(len(chart.names), ident)] if not chart.dots else []
    pieces += [key, svg_frame.across(layout.scale, area, chart.axis.title)]
    labels = []
    for number, row in enumerate(chart.rows):
        y = layout.middle(number)
        values, end = (
            _dots(row, chart.names, layout, y) if chart.dots else _bar(row, chart.names, layout, y)
        )
        pieces.append(values)
        labels += _words(row, layout, y, end)
    # From left to right, top to bottom, so that no line crosses another line's label.
    for number, rule in enumerate(sorted(chart.rules, key=lambda rule: rule.at)):
        pieces.append(_rule(rule, layout, top + LINE * (number + 1) - 3))
    pieces += labels
    return svg_frame.picture(
        chart.title, chart.says, wide, area.bottom + 2 * LINE + GAP, ident, kind, *pieces
    )


def _words(row: Row, place: Layout, y: float, end: float) -> list[Markup]:
    """Draw the name and the note of a row, above any line that passes there."""
    wide = place.area.width
    if place.beside:
        words = [text(row.label, place.area.left - 8, y + 4, "end", "label")]
        return words + ([text(row.note, end + 8, y + 4, kind="label")] if row.note else [])
    words = [text(cut(row.label, wide - width(row.note) - GAP), 1.0, y - 13, kind="label")]
    return words + ([text(row.note, wide - 1, y - 13, "end", "label")] if row.note else [])


def _layout(chart: Rows, wide: float, top: float, ident: str) -> Layout:
    label, note = (
        max(width(row.label) for row in chart.rows),
        max(width(row.note) for row in chart.rows),
    )
    beside = label <= 0.35 * wide and note <= 0.35 * wide and label + note <= 0.5 * wide
    left = label + 16 if beside else 6.0
    right = wide - (note + 20 if beside and note else 14)
    top += LINE * len(chart.rules)
    bottom = top + (BESIDE if beside else ABOVE) * len(chart.rows) + 4
    low, high = limits(chart.reach, chart.axis.log, chart.axis.zero)
    return Layout(
        Frame(wide, left, top, right, bottom),
        Scale(low, high, left, right, chart.axis.log),
        beside,
        ident,
    )


def _bar(row: Row, names: Sequence[str], place: Layout, y: float) -> tuple[Markup, float]:
    """Draw the stacked parts of a bar. Returns the markup and the x coordinate where it ends."""
    pieces, total = [], 0.0
    for named in row.values:
        start, end = place.scale(total), place.scale(total + named.value)
        says = element("title", f"{row.label}, {named.name}: {figure(named.value)}")
        fill = f"url(#{place.ident}-{names.index(named.name)})"
        box = {"x": start, "y": y - THICK / 2, "width": max(end - start, 0.75), "height": THICK}
        pieces.append(element("rect", says, class_="part", fill=fill, **box))
        total += named.value
    end = place.scale(total)
    if row.span:
        pieces.append(_span(row.span, place, y))
        end = max(end, place.scale(row.span[1]))
    return join(*pieces), end


def _dots(row: Row, names: Sequence[str], place: Layout, y: float) -> tuple[Markup, float]:
    """Draw one mark for each value, on a line from the smallest to the largest.

    Returns the markup and the x coordinate where it ends.
    """
    mark_xs = [place.scale(named.value) for named in row.values]
    pieces = [_span(row.span, place, y)] if row.span else []
    if mark_xs and not row.span:
        pieces.append(line(min(mark_xs), y, max(mark_xs), y, "stem"))
    for named, x in zip(row.values, mark_xs, strict=True):
        pieces.append(
            mark(names.index(named.name), x, y, f"{row.label}, {named.name}: {figure(named.value)}")
        )
    return join(*pieces), max(
        [*mark_xs, *(place.scale(end) for end in row.span or ())], default=place.area.left
    )


def _span(span: tuple[float, float], place: Layout, y: float) -> Markup:
    """Draw a range as a horizontal line with end caps."""
    low, high = place.scale(span[0]), place.scale(span[1])
    path = f"M{low:.2f} {y - 4:.2f}v8m0 -4H{high:.2f}m0 -4v8"
    return element("path", class_="span", d=path)


def _rule(rule: Rule, place: Layout, y: float) -> Markup:
    """Draw a vertical reference line with its label above the rows, left or right of the line."""
    line_x, width_pixels = place.scale(rule.at), place.area.width
    label_left = line_x + 5 + width(rule.label) > width_pixels and line_x > width_pixels / 2
    words = cut(rule.label, (line_x if label_left else width_pixels - line_x) - 6)
    path = f"M{line_x:.2f} {y - 9:.2f}V{place.area.bottom:.2f}"
    return join(
        # a background: the bars below may be as dark as the line
        element("path", class_="rule under", d=path),
        element("path", class_="rule", d=path),
        text(
            words,
            line_x - 5 if label_left else line_x + 5,
            y,
            "end" if label_left else None,
            "label",
        ),
    )


def _swatch(number: int, ident: str) -> Markup:
    """Draw the legend sample of a part of a bar."""
    return element(
        "rect", class_="part", fill=f"url(#{ident}-{number})", x=2, y=-6, width=18, height=12
    )
