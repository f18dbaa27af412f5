"""Charts of two numeric axes as SVG: lines, marks, and labels where there is room for them."""

from llmcli.charts import svg_frame
from llmcli.charts.chart import Plot, Rule, Series
from llmcli.charts.label_layout import LINE, Box, Room, cut, width
from llmcli.charts.markup import Markup, element, join
from llmcli.charts.scale import Scale, figure, limits, tick_labels
from llmcli.charts.svg_frame import DASHES, GAP, Frame, colour, mark, text


def draw(plot: Plot, wide: float, ident: str, kind: str) -> Markup:
    """Draw the plot as SVG, `wide` pixels wide."""
    points = [point for series in plot.series for point in series.points]
    pieces = [text(cut(plot.y.title, wide), 0, 12, kind="title")]
    legend_entries = [
        (number, series)
        for number, series in enumerate(plot.series)
        if len(plot.series) > 1 and series.name
    ]
    key, top = svg_frame.legend(
        [series.name for _, series in legend_entries],
        wide,
        LINE + 4,
        [_sample(*series) for series in legend_entries],
    )
    plot_height = min(340.0, max(220.0, wide * 0.5))
    (x_low, x_high), (y_low, y_high) = (
        limits([p.x for p in points] + [rule.at for rule in plot.rules], plot.x.log),
        limits([p.y for p in points], plot.y.log),
    )
    y = Scale(y_low, y_high, top + GAP + plot_height, top + GAP, plot.y.log)
    y_ticks = y.ticks(6)
    left = max(width(label) for label in tick_labels(y_ticks)) + GAP
    area = Frame(wide, left, top + GAP, wide - 12, top + GAP + plot_height)
    x = Scale(x_low, x_high, area.left, area.right, plot.x.log)
    for value, label in zip(y_ticks, tick_labels(y_ticks), strict=True):
        pieces.append(svg_frame.line(area.left, y(value), area.right, y(value), "grid"))
        pieces.append(text(label, area.left - 6, y(value) + 4, "end", "tick"))
    room = Room(Box(area.left + 2, area.top + 2, area.right, area.bottom - 2))
    pieces += [key, svg_frame.across(x, area, plot.x.title)]
    pieces += [_rule(rule, x, area, room) for rule in plot.rules]
    pieces += [_series(number, series, x, y, room) for number, series in enumerate(plot.series)]
    pieces += [_labels(series, x, y, room) for series in plot.series]
    return svg_frame.picture(
        plot.title, plot.says, wide, area.bottom + 2 * LINE + GAP, ident, kind, *pieces
    )


def _sample(number: int, series: Series) -> Markup:
    """Draw the legend sample of a series."""
    return join(
        element(
            "path",
            class_=f"line {colour(number)}",
            d="M0 0H22",
            stroke_dasharray=DASHES[number % len(DASHES)],
        )
        if series.line
        else Markup(),
        mark(number, 11, 0) if series.marks else Markup(),
    )


def _series(number: int, series: Series, x: Scale, y: Scale, room: Room) -> Markup:
    """Draw the line and the marks of a series, and reserve their space in `room`."""
    places = [(x(point.x), y(point.y)) for point in series.points]
    pieces = []
    if series.line and len(places) > 1:
        room.line(places)
        path = "M" + "L".join(f"{px:.2f} {py:.2f}" for px, py in places)
        dashes = DASHES[number % len(DASHES)]
        pieces.append(
            element("path", class_=f"line {colour(number)}", d=path, stroke_dasharray=dashes)
        )
    if series.marks:
        for point, (px, py) in zip(series.points, places, strict=True):
            says = point.words or f"{series.name}: {figure(point.x)}, {figure(point.y)}"
            pieces.append(mark(number, px, py, says))
            room.mark(px, py)
    return join(*pieces)


def _labels(series: Series, x: Scale, y: Scale, room: Room) -> Markup:
    """Draw the labels of points that fit into the free space."""
    pieces = []
    for point in series.points:
        px, py = x(point.x), y(point.y)
        candidates = (
            (words, room.place(words, px, py))
            for words in dict.fromkeys((point.words, point.label))
            if words
        )
        words, spot = next(((words, spot) for words, spot in candidates if spot), ("", None))
        if spot:
            box = spot.box
            if spot.far:
                nearest = min(max(px, box.left), box.right), min(max(py, box.top), box.bottom)
                pieces.append(svg_frame.line(px, py, *nearest, "lead"))
            pieces.append(text(words, box.left, box.bottom - 4, kind="label"))
    return join(*pieces)


def _rule(rule: Rule, x: Scale, area: Frame, room: Room) -> Markup:
    """Draw a vertical reference line, with its label at the top on the side that has space."""
    line_x = x(rule.at)
    room.line([(line_x, area.top), (line_x, area.bottom)])
    words = cut(rule.label, max(area.right - line_x, line_x - area.left) - 6)
    label_width = width(words)
    left = line_x + 5 if line_x + 5 + label_width <= area.right else line_x - 5 - label_width
    y = area.top + 14
    while (
        any(
            Box(left, y - 12, left + label_width, y + 4).shared(occupied) for occupied in room.taken
        )
        and y < area.bottom - LINE
    ):
        y += LINE
    room.taken.append(Box(left, y - 12, left + label_width, y + 4))
    return join(
        svg_frame.line(line_x, area.top, line_x, area.bottom, "rule"),
        text(words, left, y, kind="label"),
    )
