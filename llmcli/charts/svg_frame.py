"""What SVG plots and SVG bar charts share: marks, axes, legends and the surrounding picture.

Color alone never distinguishes series: each series has its own mark and dashes, each part of a bar
its own hatching. Colors are CSS classes of the page, so that one picture works in light mode, in
dark mode and on paper.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from llmcli.charts.label_layout import LINE, SIZE, cut, width
from llmcli.charts.markup import Markup, element, join
from llmcli.charts.scale import Scale, tick_labels

COLOURS = 6
SHAPES = ("circle", "square", "up", "diamond", "down", "cross")
DASHES = (None, "7 4", "2 3", "9 3 2 3", "1 4", "12 3")
# The last two fills have no color: they are for the last parts of a stack, such as free memory.
HATCHES = (
    "",
    "M0 6L6 0",
    "M0 3H6",
    "M0 0L6 6",
    "M3 0V6",
    "M0 6L6 0M0 0L6 6",
    "M2 3H4",
    "M0 3H6M3 0V6",
)
GAP = 8.0


@dataclass(frozen=True, slots=True)
class Frame:
    """The area in which values are drawn, inside a picture that is `width` pixels wide."""

    width: float
    left: float
    top: float
    right: float
    bottom: float


def colour(number: int) -> str:
    """Return the CSS class of a series' color."""
    return f"c{number % COLOURS}"


def mark(number: int, x: float, y: float, says: str = "", size: float = 4.5) -> Markup:
    """Draw the mark of series `number` at (x, y). `tooltip` is shown when the pointer is over the
    mark.
    """
    shape, s = SHAPES[number % len(SHAPES)], size
    title = element("title", says) if says else None
    kind = f"mark {colour(number)}" + ("" if number < len(SHAPES) else " hollow")
    if shape == "circle":
        return element("circle", title, class_=kind, cx=x, cy=y, r=s)
    paths = {
        "square": f"M{x - s:.2f} {y - s:.2f}h{2 * s}v{2 * s}h{-2 * s}z",
        "up": f"M{x:.2f} {y - 1.2 * s:.2f}l{1.2 * s:.2f} {2.1 * s:.2f}h{-2.4 * s:.2f}z",
        "down": f"M{x:.2f} {y + 1.2 * s:.2f}l{1.2 * s:.2f} {-2.1 * s:.2f}h{-2.4 * s:.2f}z",
        "diamond": f"M{x:.2f} {y - 1.3 * s:.2f}l{1.3 * s:.2f} {1.3 * s:.2f}"
        f"l{-1.3 * s:.2f} {1.3 * s:.2f}l{-1.3 * s:.2f} {-1.3 * s:.2f}z",
        "cross": f"M{x - s:.2f} {y - s:.2f}l{2 * s} {2 * s}m0 {-2 * s}l{-2 * s} {2 * s}",
    }
    return element(
        "path", title, class_=kind + (" open" if shape == "cross" else ""), d=paths[shape]
    )


def text(
    words: str, x: float, y: float, anchor: str | None = None, kind: str | None = None
) -> Markup:
    """Draw text whose base line starts, ends or is centered at (x, y)."""
    return element("text", words, x=x, y=y, text_anchor=anchor, class_=kind)


def line(x1: float, y1: float, x2: float, y2: float, kind: str) -> Markup:
    """Draw a straight line."""
    return element("line", class_=kind, x1=x1, y1=y1, x2=x2, y2=y2)


def across(scale: Scale, frame: Frame, title: str) -> Markup:
    """Draw the x axis: grid lines, ticks and title."""
    max_width = frame.right - frame.left
    max_ticks = 8
    while (
        max_ticks > 2
        and sum(width(label) + 2 * GAP for label in tick_labels(scale.ticks(max_ticks))) > max_width
    ):
        max_ticks -= 1
    values = scale.ticks(max_ticks)
    pieces = [line(scale(v), frame.top, scale(v), frame.bottom, "grid") for v in values]
    pieces.append(line(frame.left, frame.bottom, frame.right, frame.bottom, "axis"))
    for value, label in zip(values, tick_labels(values), strict=True):
        half = width(label) / 2
        label_x = min(max(scale(value), half + 1), frame.width - half - 1)
        pieces.append(text(label, label_x, frame.bottom + LINE, "middle", "tick"))
    middle = (frame.left + frame.right) / 2
    half = min(middle, frame.width - middle) - 1
    pieces.append(
        text(cut(title, 2 * half), middle, frame.bottom + 2 * LINE + 2, "middle", "title")
    )
    return join(*pieces)


def legend(
    names: Sequence[str], room: float, top: float, samples: Sequence[Markup]
) -> tuple[Markup, float]:
    """Draw the names next to their samples, in as many lines as they need.

    Each sample is drawn at (0, 0) and is 22 pixels wide. Returns the markup and the y coordinate
    below the legend.
    """
    pieces, x, y = [], 0.0, top
    for name, sample in zip(names, samples, strict=True):
        shown = cut(name, room - 28)
        entry_width = 28 + width(shown)
        if x and x + entry_width > room:
            x, y = 0.0, y + LINE + 2
        pieces.append(
            element(
                "g", sample, text(shown, 26, 4), transform=f"translate({x:.2f} {y + SIZE / 2:.2f})"
            )
        )
        x += entry_width + 2 * GAP
    return join(*pieces), y + LINE + GAP if names else top


def picture(
    title: str, says: str, wide: float, high: float, ident: str, kind: str, *pieces: Markup
) -> Markup:
    """Return the complete SVG element with its accessible title and description."""
    return element(
        "svg",
        element("title", title, id=f"{ident}-t"),
        element("desc", says, id=f"{ident}-d"),
        *pieces,
        xmlns="http://www.w3.org/2000/svg",
        role="img",
        class_=f"chart {kind}",
        width=wide,
        height=high,
        viewBox=f"0 0 {wide:.0f} {high:.0f}",
        aria_labelledby=f"{ident}-t {ident}-d",
    )


def hatches(count: int, ident: str) -> Markup:
    """Return the fill patterns of `count` bar parts, named `ident`-0, `ident`-1, …"""
    return element(
        "defs", *(_hatch(number % len(HATCHES), f"{ident}-{number}") for number in range(count))
    )


def _hatch(kind: int, ident: str) -> Markup:
    lines = element("path", class_=f"hatch h{kind}", d=HATCHES[kind]) if HATCHES[kind] else None
    ground = element("rect", class_=f"fill f{kind}", width=6, height=6)
    return element(
        "pattern", ground, lines, id=ident, width=6, height=6, patternUnits="userSpaceOnUse"
    )
