"""Two measured axes as SVG: lines, marks and their labels, each label where there is room for it."""

from llmcli.bench.charts import frame
from llmcli.bench.charts.chart import Plot, Rule, Series
from llmcli.bench.charts.frame import DASHES, GAP, Frame, colour, mark, text
from llmcli.bench.charts.letters import LINE, Box, Room, cut, width
from llmcli.bench.charts.markup import Markup, element, join
from llmcli.bench.charts.scale import Scale, figure, limits, tick_labels


def draw(plot: Plot, wide: float, ident: str, kind: str) -> Markup:
    """The picture, `wide` pixels wide."""
    points = [point for one in plot.series for point in one.points]
    pieces = [text(cut(plot.y.title, wide), 0, 12, kind="title")]
    shown = [
        (number, one) for number, one in enumerate(plot.series) if len(plot.series) > 1 and one.name
    ]
    key, top = frame.legend(
        [one.name for _, one in shown], wide, LINE + 4, [_sample(*one) for one in shown]
    )
    high = min(340.0, max(220.0, wide * 0.5))
    (x_low, x_high), (y_low, y_high) = (
        limits([p.x for p in points] + [rule.at for rule in plot.rules], plot.x.log),
        limits([p.y for p in points], plot.y.log),
    )
    y = Scale(y_low, y_high, top + GAP + high, top + GAP, plot.y.log)
    marks = y.ticks(6)
    left = max(width(label) for label in tick_labels(marks)) + GAP
    area = Frame(wide, left, top + GAP, wide - 12, top + GAP + high)
    x = Scale(x_low, x_high, area.left, area.right, plot.x.log)
    for value, label in zip(marks, tick_labels(marks), strict=True):
        pieces.append(frame.line(area.left, y(value), area.right, y(value), "grid"))
        pieces.append(text(label, area.left - 6, y(value) + 4, "end", "tick"))
    room = Room(Box(area.left + 2, area.top + 2, area.right, area.bottom - 2))
    pieces += [key, frame.across(x, area, plot.x.title)]
    pieces += [_rule(rule, x, area, room) for rule in plot.rules]
    pieces += [_series(number, one, x, y, room) for number, one in enumerate(plot.series)]
    pieces += [_labels(one, x, y, room) for one in plot.series]
    return frame.picture(
        plot.title, plot.says, wide, area.bottom + 2 * LINE + GAP, ident, kind, *pieces
    )


def _sample(number: int, series: Series) -> Markup:
    """A series as the legend shows it."""
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
    """A series' line and marks, whose places are taken then."""
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
    """The points' labels, as many as find room."""
    pieces = []
    for point in series.points:
        px, py = x(point.x), y(point.y)
        found = (
            (words, room.place(words, px, py))
            for words in dict.fromkeys((point.words, point.label))
            if words
        )
        words, spot = next(((words, spot) for words, spot in found if spot), ("", None))
        if spot:
            box = spot.box
            if spot.far:
                nearest = min(max(px, box.left), box.right), min(max(py, box.top), box.bottom)
                pieces.append(frame.line(px, py, *nearest, "lead"))
            pieces.append(text(words, box.left, box.bottom - 4, kind="label"))
    return join(*pieces)


def _rule(rule: Rule, x: Scale, area: Frame, room: Room) -> Markup:
    """A line down the picture, its word at the top on the side that has room."""
    at = x(rule.at)
    room.line([(at, area.top), (at, area.bottom)])
    words = cut(rule.label, max(area.right - at, at - area.left) - 6)
    wide = width(words)
    left = at + 5 if at + 5 + wide <= area.right else at - 5 - wide
    y = area.top + 14
    while (
        any(Box(left, y - 12, left + wide, y + 4).shared(one) for one in room.taken)
        and y < area.bottom - LINE
    ):
        y += LINE
    room.taken.append(Box(left, y - 12, left + wide, y + 4))
    return join(
        frame.line(at, area.top, at, area.bottom, "rule"), text(words, left, y, kind="label")
    )
