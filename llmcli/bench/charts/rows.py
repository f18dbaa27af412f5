"""Bars and rows of marks as SVG: names beside them where there is room, above them on a narrow
picture.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from llmcli.bench.charts import frame
from llmcli.bench.charts.chart import Row, Rows, Rule
from llmcli.bench.charts.frame import GAP, Frame, line, mark, text
from llmcli.bench.charts.letters import LINE, cut, width
from llmcli.bench.charts.markup import Markup, element, join
from llmcli.bench.charts.scale import Scale, figure, limits

BESIDE, ABOVE, THICK = 28.0, 46.0, 14.0  # heights of a row, of a bar


@dataclass(frozen=True, slots=True)
class Layout:
    """Where rows lie. `beside`: names at the left and notes behind the values, else both above
    them.
    """

    area: Frame
    scale: Scale
    beside: bool
    ident: str

    def middle(self, number: int) -> float:
        """The height of a row's values."""
        return self.area.top + (BESIDE * number + 16 if self.beside else ABOVE * number + 32)


def draw(chart: Rows, wide: float, ident: str, kind: str) -> Markup:
    """The picture, `wide` pixels wide."""
    names = chart.names if len(chart.names) > 1 else ()
    samples = [mark(n, 11, 0) if chart.dots else _swatch(n, ident) for n in range(len(names))]
    key, top = frame.legend(names, wide, 2, samples)
    place = _layout(chart, wide, top, ident)
    area = place.area
    pieces = [frame.hatches(len(chart.names), ident)] if not chart.dots else []
    pieces += [key, frame.across(place.scale, area, chart.axis.title)]
    words = []
    for number, row in enumerate(chart.rows):
        y = place.middle(number)
        values, end = (
            _dots(row, chart.names, place, y) if chart.dots else _bar(row, chart.names, place, y)
        )
        pieces.append(values)
        words += _words(row, place, y, end)
    # The leftmost on top: no line goes through the words of another.
    for number, rule in enumerate(sorted(chart.rules, key=lambda rule: rule.at)):
        pieces.append(_rule(rule, place, top + LINE * (number + 1) - 3))
    pieces += words
    return frame.picture(
        chart.title, chart.says, wide, area.bottom + 2 * LINE + GAP, ident, kind, *pieces
    )


def _words(row: Row, place: Layout, y: float, end: float) -> list[Markup]:
    """A row's name and note, over whatever line goes there."""
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
    """The parts of a bar one behind the other; and where it ends."""
    pieces, at = [], 0.0
    for one in row.values:
        start, end = place.scale(at), place.scale(at + one.value)
        says = element("title", f"{row.label}, {one.name}: {figure(one.value)}")
        fill = f"url(#{place.ident}-{names.index(one.name)})"
        box = {"x": start, "y": y - THICK / 2, "width": max(end - start, 0.75), "height": THICK}
        pieces.append(element("rect", says, class_="part", fill=fill, **box))
        at += one.value
    end = place.scale(at)
    if row.span:
        pieces.append(_span(row.span, place, y))
        end = max(end, place.scale(row.span[1]))
    return join(*pieces), end


def _dots(row: Row, names: Sequence[str], place: Layout, y: float) -> tuple[Markup, float]:
    """A mark for each value on a line from the least to the greatest; and where it ends."""
    places = [place.scale(one.value) for one in row.values]
    pieces = [_span(row.span, place, y)] if row.span else []
    if places and not row.span:
        pieces.append(line(min(places), y, max(places), y, "stem"))
    for one, x in zip(row.values, places, strict=True):
        pieces.append(
            mark(names.index(one.name), x, y, f"{row.label}, {one.name}: {figure(one.value)}")
        )
    return join(*pieces), max(
        [*places, *(place.scale(end) for end in row.span or ())], default=place.area.left
    )


def _span(span: tuple[float, float], place: Layout, y: float) -> Markup:
    """A range as a line between two bars."""
    low, high = place.scale(span[0]), place.scale(span[1])
    path = f"M{low:.2f} {y - 4:.2f}v8m0 -4H{high:.2f}m0 -4v8"
    return element("path", class_="span", d=path)


def _rule(rule: Rule, place: Layout, y: float) -> Markup:
    """A line down the rows, its words above them: behind the line, or before it where there is more
    room.
    """
    at, wide = place.scale(rule.at), place.area.width
    before = at + 5 + width(rule.label) > wide and at > wide / 2
    words = cut(rule.label, (at if before else wide - at) - 6)
    path = f"M{at:.2f} {y - 9:.2f}V{place.area.bottom:.2f}"
    return join(
        element("path", class_="rule under", d=path),  # what it crosses may be as dark as itself
        element("path", class_="rule", d=path),
        text(words, at - 5 if before else at + 5, y, "end" if before else None, "label"),
    )


def _swatch(number: int, ident: str) -> Markup:
    """A part of a bar as the legend shows it."""
    return element(
        "rect", class_="part", fill=f"url(#{ident}-{number})", x=2, y=-6, width=18, height=12
    )
