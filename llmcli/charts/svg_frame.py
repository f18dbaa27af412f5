"""Draws what all SVG charts have in common: marks, axes, legends and the surrounding SVG element.

Color is never the only difference, because some readers cannot distinguish the colors. Each series
also has its own mark and dashes, and each segment of a bar its own hatching. Colors are CSS classes
of the page, so that the same picture works in light mode, in dark mode and on paper.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from llmcli.charts.label_layout import FONT_PIXELS, LINE_PIXELS, shorten_to_width, text_width
from llmcli.charts.markup import Markup, build_element, join_markup
from llmcli.charts.scale import Scale, format_ticks

N_COLORS = 6
MARK_SHAPES = ("circle", "square", "up", "diamond", "down", "cross")
LINE_DASHES = (None, "7 4", "2 3", "9 3 2 3", "1 4", "12 3")
# SVG paths of the hatching of bar segments, on a tile of 6 x 6 pixels. The last two are drawn
# without color. They are for the last segments of a stacked bar, such as free memory.
HATCH_PATHS = (
    "",
    "M0 6L6 0",
    "M0 3H6",
    "M0 0L6 6",
    "M3 0V6",
    "M0 6L6 0M0 0L6 6",
    "M2 3H4",
    "M0 3H6M3 0V6",
)
GAP_PIXELS = 8.0  # space between neighboring elements


@dataclass(frozen=True, slots=True)
class Frame:
    """The area of a picture between the axes, in pixels. `width`: width of the complete picture."""

    width: float
    x_min: float
    y_min: float
    x_max: float
    y_max: float


def color_class(number: int) -> str:
    """Return the CSS class for the color of series `number`. Colors repeat after N_COLORS."""
    return f"c{number % N_COLORS}"


def draw_mark(number: int, x: float, y: float, tooltip: str = "", size: float = 4.5) -> Markup:
    """Draw the mark of series `number` at (x, y). `tooltip`: text that appears when the pointer is
    on the mark. `size`: half of the mark's width in pixels.
    """
    shape, s = MARK_SHAPES[number % len(MARK_SHAPES)], size
    title = build_element("title", tooltip) if tooltip else None
    css_class = f"mark {color_class(number)}" + ("" if number < len(MARK_SHAPES) else " hollow")
    if shape == "circle":
        return build_element("circle", title, class_=css_class, cx=x, cy=y, r=s)
    paths = {
        "square": f"M{x - s:.2f} {y - s:.2f}h{2 * s}v{2 * s}h{-2 * s}z",
        "up": f"M{x:.2f} {y - 1.2 * s:.2f}l{1.2 * s:.2f} {2.1 * s:.2f}h{-2.4 * s:.2f}z",
        "down": f"M{x:.2f} {y + 1.2 * s:.2f}l{1.2 * s:.2f} {-2.1 * s:.2f}h{-2.4 * s:.2f}z",
        "diamond": f"M{x:.2f} {y - 1.3 * s:.2f}l{1.3 * s:.2f} {1.3 * s:.2f}"
        f"l{-1.3 * s:.2f} {1.3 * s:.2f}l{-1.3 * s:.2f} {-1.3 * s:.2f}z",
        "cross": f"M{x - s:.2f} {y - s:.2f}l{2 * s} {2 * s}m0 {-2 * s}l{-2 * s} {2 * s}",
    }
    return build_element(
        "path", title, class_=css_class + (" open" if shape == "cross" else ""), d=paths[shape]
    )


def draw_text(
    content: str, x: float, y: float, anchor: str | None = None, css_class: str | None = None
) -> Markup:
    """Draw a text with its baseline at y. `anchor`: None if the text starts at x, "middle" if it is
    centered at x, "end" if it ends at x.
    """
    return build_element("text", content, x=x, y=y, text_anchor=anchor, class_=css_class)


def draw_line(x1: float, y1: float, x2: float, y2: float, css_class: str) -> Markup:
    """Draw a straight line from (x1, y1) to (x2, y2)."""
    return build_element("line", class_=css_class, x1=x1, y1=y1, x2=x2, y2=y2)


def draw_x_axis(scale: Scale, frame: Frame, title: str) -> Markup:
    """Draw the x axis below the frame: the axis line, vertical grid lines, tick labels and the
    title. There are as many ticks, up to 8, as have space for their labels.
    """
    max_width = frame.x_max - frame.x_min
    max_ticks = 8
    while (
        max_ticks > 2
        and sum(
            text_width(label) + 2 * GAP_PIXELS for label in format_ticks(scale.ticks(max_ticks))
        )
        > max_width
    ):
        max_ticks -= 1
    values = scale.ticks(max_ticks)
    elements = [draw_line(scale(v), frame.y_min, scale(v), frame.y_max, "grid") for v in values]
    elements.append(draw_line(frame.x_min, frame.y_max, frame.x_max, frame.y_max, "axis"))
    for value, label in zip(values, format_ticks(values), strict=True):
        half = text_width(label) / 2
        label_x = min(max(scale(value), half + 1), frame.width - half - 1)
        elements.append(draw_text(label, label_x, frame.y_max + LINE_PIXELS, "middle", "tick"))
    middle = (frame.x_min + frame.x_max) / 2
    half = min(middle, frame.width - middle) - 1
    elements.append(
        draw_text(
            shorten_to_width(title, 2 * half),
            middle,
            frame.y_max + 2 * LINE_PIXELS + 2,
            "middle",
            "title",
        )
    )
    return join_markup(*elements)


def draw_legend(
    names: Sequence[str], max_width: float, top: float, samples: Sequence[Markup]
) -> tuple[Markup, float]:
    """Draw the legend of a chart: each name next to a sample of its mark, line or fill, in as many
    lines as needed.

    `top`: y coordinate of the first line. `samples`: markup that is 22 pixels wide and drawn at
    (0, 0). Return the markup of the legend, and the y coordinate below it.
    """
    elements, x, y = [], 0.0, top
    for name, sample in zip(names, samples, strict=True):
        label = shorten_to_width(name, max_width - 28)
        entry_width = 28 + text_width(label)
        if x and x + entry_width > max_width:
            x, y = 0.0, y + LINE_PIXELS + 2
        elements.append(
            build_element(
                "g",
                sample,
                draw_text(label, 26, 4),
                transform=f"translate({x:.2f} {y + FONT_PIXELS / 2:.2f})",
            )
        )
        x += entry_width + 2 * GAP_PIXELS
    return join_markup(*elements), y + LINE_PIXELS + GAP_PIXELS if names else top


def build_svg(
    title: str,
    description: str,
    width_pixels: float,
    height_pixels: float,
    ident: str,
    css_class: str,
    *elements: Markup,
) -> Markup:
    """Return the SVG element that contains `elements`. Its title and description are for screen
    readers. For `ident` and `css_class` see svg.draw_chart.
    """
    return build_element(
        "svg",
        build_element("title", title, id=f"{ident}-t"),
        build_element("desc", description, id=f"{ident}-d"),
        *elements,
        xmlns="http://www.w3.org/2000/svg",
        role="img",
        class_=f"chart {css_class}",
        width=width_pixels,
        height=height_pixels,
        viewBox=f"0 0 {width_pixels:.0f} {height_pixels:.0f}",
        aria_labelledby=f"{ident}-t {ident}-d",
    )


def hatch_patterns(count: int, ident: str) -> Markup:
    """Return the definitions of SVG fill patterns for `count` bar segments. The ids of the patterns
    are `ident`-0, `ident`-1, and so on.
    """
    return build_element(
        "defs", *(_hatch(number % len(HATCH_PATHS), f"{ident}-{number}") for number in range(count))
    )


def _hatch(number: int, ident: str) -> Markup:
    """Return an SVG pattern: fill color `number` with the lines HATCH_PATHS[number] on it."""
    lines = (
        build_element("path", class_=f"hatch h{number}", d=HATCH_PATHS[number])
        if HATCH_PATHS[number]
        else None
    )
    background = build_element("rect", class_=f"fill f{number}", width=6, height=6)
    return build_element(
        "pattern", background, lines, id=ident, width=6, height=6, patternUnits="userSpaceOnUse"
    )
