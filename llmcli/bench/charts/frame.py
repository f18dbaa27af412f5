"""What plots and rows share as SVG: marks by number, axes, legends, the picture around them.

Nothing is told by colour alone: each series has its own mark and dashes, each part of a bar its own
hatching. Colours are classes of the page's style (style.py), so that one picture suits light, dark
and paper.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from llmcli.bench.charts.letters import LINE, SIZE, cut, width
from llmcli.bench.charts.markup import Markup, element, join
from llmcli.bench.charts.scale import Scale, tick_labels

COLOURS = 6
SHAPES = ("circle", "square", "up", "diamond", "down", "cross")
DASHES = (None, "7 4", "2 3", "9 3 2 3", "1 4", "12 3")
# Two of the fills are no colour at all: the last parts of a stack are what is free, or the rest.
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
    """The area that values are drawn in, within a picture that is `width` wide."""

    width: float
    left: float
    top: float
    right: float
    bottom: float


def colour(number: int) -> str:
    """The class of a series' colour."""
    return f"c{number % COLOURS}"


def mark(number: int, x: float, y: float, says: str = "", size: float = 4.5) -> Markup:
    """The mark of a series, by its number; pointed at, it says what it stands for."""
    shape, s = SHAPES[number % len(SHAPES)], size
    title = element("title", says) if says else None
    kind = f"mark {colour(number)}" + ("" if number < len(SHAPES) else " hollow")
    if shape == "circle":
        return element("circle", title, class_=kind, cx=x, cy=y, r=s)
    paths = {
        "square": f"M{x - s:.2f} {y - s:.2f}h{2 * s}v{2 * s}h{-2 * s}z",
        "up": f"M{x:.2f} {y - 1.2 * s:.2f}l{1.2 * s:.2f} {2.1 * s:.2f}h{-2.4 * s:.2f}z",
        "down": f"M{x:.2f} {y + 1.2 * s:.2f}l{1.2 * s:.2f} {-2.1 * s:.2f}h{-2.4 * s:.2f}z",
        "diamond": f"M{x:.2f} {y - 1.3 * s:.2f}l{1.3 * s:.2f} {1.3 * s:.2f}l{-1.3 * s:.2f} {1.3 * s:.2f}"
        f"l{-1.3 * s:.2f} {-1.3 * s:.2f}z",
        "cross": f"M{x - s:.2f} {y - s:.2f}l{2 * s} {2 * s}m0 {-2 * s}l{-2 * s} {2 * s}",
    }
    return element(
        "path", title, class_=kind + (" open" if shape == "cross" else ""), d=paths[shape]
    )


def text(
    words: str, x: float, y: float, anchor: str | None = None, kind: str | None = None
) -> Markup:
    """Words whose base line begins, ends or is centred at (x, y)."""
    return element("text", words, x=x, y=y, text_anchor=anchor, class_=kind)


def line(x1: float, y1: float, x2: float, y2: float, kind: str) -> Markup:
    """A straight line."""
    return element("line", class_=kind, x1=x1, y1=y1, x2=x2, y2=y2)


def across(scale: Scale, frame: Frame, title: str) -> Markup:
    """The axis at the bottom: grid, ticks and title."""
    room = frame.right - frame.left
    most = 8
    while (
        most > 2 and sum(width(label) + 2 * GAP for label in tick_labels(scale.ticks(most))) > room
    ):
        most -= 1
    found = scale.ticks(most)
    pieces = [line(scale(v), frame.top, scale(v), frame.bottom, "grid") for v in found]
    pieces.append(line(frame.left, frame.bottom, frame.right, frame.bottom, "axis"))
    for value, label in zip(found, tick_labels(found), strict=True):
        half = width(label) / 2
        at = min(max(scale(value), half + 1), frame.width - half - 1)
        pieces.append(text(label, at, frame.bottom + LINE, "middle", "tick"))
    middle = (frame.left + frame.right) / 2
    half = min(middle, frame.width - middle) - 1
    pieces.append(
        text(cut(title, 2 * half), middle, frame.bottom + 2 * LINE + 2, "middle", "title")
    )
    return join(*pieces)


def legend(
    names: Sequence[str], room: float, top: float, samples: Sequence[Markup]
) -> tuple[Markup, float]:
    """Names behind their samples (drawn at 0, 0; 22 wide), in as many lines as they need; and where
    the last ends.
    """
    pieces, x, y = [], 0.0, top
    for name, sample in zip(names, samples, strict=True):
        shown = cut(name, room - 28)
        wide = 28 + width(shown)
        if x and x + wide > room:
            x, y = 0.0, y + LINE + 2
        pieces.append(
            element(
                "g", sample, text(shown, 26, 4), transform=f"translate({x:.2f} {y + SIZE / 2:.2f})"
            )
        )
        x += wide + 2 * GAP
    return join(*pieces), y + LINE + GAP if names else top


def picture(
    title: str, says: str, wide: float, high: float, ident: str, kind: str, *pieces: Markup
) -> Markup:
    """The whole drawing with the words that stand for it."""
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
    """Fills for the parts of a bar, as patterns `ident`-0, `ident`-1, …"""
    return element(
        "defs", *(_hatch(number % len(HATCHES), f"{ident}-{number}") for number in range(count))
    )


def _hatch(kind: int, ident: str) -> Markup:
    lines = element("path", class_=f"hatch h{kind}", d=HATCHES[kind]) if HATCHES[kind] else None
    ground = element("rect", class_=f"fill f{kind}", width=6, height=6)
    return element(
        "pattern", ground, lines, id=ident, width=6, height=6, patternUnits="userSpaceOnUse"
    )
