"""Finds free positions for the labels in an SVG chart, and estimates the width of texts in pixels
or terminal columns.

Pixel widths are estimates, because the picture is drawn with the reader's own fonts.
"""

import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise

FONT_PIXELS, LINE_PIXELS = 12, 16  # size of the font, and height of a line of text
NARROW_LETTERS, WIDE_LETTERS = frozenset("ijl.,:;'|!()[]tfrI "), frozenset("mwMW@%±→")
LABEL_DISTANCES = (10.0, 24.0, 40.0, 58.0)  # pixels from a mark to its label, tried in this order
MARK_CLEARANCE = 14.0  # minimum distance in pixels of a label from the marks of other points
# Directions (x, y) from a mark to its label. A y of -1 is up, as in SVG.
LABEL_DIRECTIONS = ((1, 0), (-1, 0), (0, -1), (0, 1), (1, -1), (-1, -1), (1, 1), (-1, 1))


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangle in a picture, in pixels. As in SVG, y grows downward."""

    x_min: float
    y_min: float
    x_max: float
    y_max: float

    def overlap_area(self, other: "Box") -> float:
        """Return the area of the intersection of two boxes, in square pixels."""
        across = min(self.x_max, other.x_max) - max(self.x_min, other.x_min)
        down = min(self.y_max, other.y_max) - max(self.y_min, other.y_min)
        return across * down if across > 0 and down > 0 else 0.0

    def contains(self, other: "Box") -> bool:
        """Return whether the box `other` is completely inside this box."""
        return (
            self.x_min <= other.x_min
            and self.x_max >= other.x_max
            and self.y_min <= other.y_min
            and self.y_max >= other.y_max
        )


@dataclass(frozen=True, slots=True)
class LabelSpot:
    """The position of a label. `needs_leader`: whether the label is so far from its mark that a
    line must connect both.
    """

    box: Box
    needs_leader: bool


@dataclass(slots=True)
class LabelLayout:
    """Finds free space for the labels of a chart within `area`, and remembers what is drawn there.

    - `occupied`: boxes that labels must not cover.
    - `lines`: boxes along drawn lines, of which a label covers as few as possible.
    - `marks`: positions of the marks of points. A label stays MARK_CLEARANCE away from the marks
      of other points, because it would otherwise seem to belong to them.
    """

    area: Box
    occupied: list[Box] = field(default_factory=list)
    marks: list[tuple[float, float]] = field(default_factory=list)
    lines: list[Box] = field(default_factory=list)

    def place_label(self, text: str, x: float, y: float) -> LabelSpot | None:
        """Return a free position for a label near its mark at (x, y), and reserve it. Return None
        if there is no free position.
        """
        label_width = text_width(text)
        for distance in LABEL_DISTANCES:
            free_boxes = []
            for step_x, step_y in LABEL_DIRECTIONS:
                offset = distance * (0.75 if step_x and step_y else 1.0)
                left = (
                    x
                    + step_x * offset
                    - (0.0 if step_x > 0 else label_width if step_x < 0 else label_width / 2)
                )
                middle = y + step_y * (offset + (LINE_PIXELS / 4 if not step_x else 0))
                box = Box(
                    left, middle - LINE_PIXELS / 2, left + label_width, middle + LINE_PIXELS / 2
                )
                if self.area.contains(box) and self._is_free(box, x, y):
                    free_boxes.append(box)
            if free_boxes:
                chosen = min(
                    free_boxes,
                    key=lambda box: sum(box.overlap_area(line) > 0 for line in self.lines),
                )
                self.occupied.append(chosen)
                return LabelSpot(chosen, distance > LABEL_DISTANCES[0])
        return None

    def add_mark(self, x: float, y: float, size: float = 6) -> None:
        """Reserve the space of a mark at (x, y), which extends `size` pixels in each direction, so
        that no label covers it.
        """
        self.occupied.append(Box(x - size, y - size, x + size, y + size))
        self.marks.append((x, y))

    def _is_free(self, box: Box, x: float, y: float) -> bool:
        """Return whether the label of the mark at (x, y) may be drawn in `box`."""
        near = Box(
            box.x_min - MARK_CLEARANCE,
            box.y_min - MARK_CLEARANCE / 2,
            box.x_max + MARK_CLEARANCE,
            box.y_max + MARK_CLEARANCE / 2,
        )
        other_marks = (
            Box(mark_x, mark_y, mark_x + 0.1, mark_y + 0.1)
            for mark_x, mark_y in self.marks
            if abs(mark_x - x) + abs(mark_y - y) > 1
        )
        return not any(box.overlap_area(occupied) for occupied in self.occupied) and not any(
            near.overlap_area(occupied) for occupied in other_marks
        )

    def add_line(self, points: Iterable[tuple[float, float]]) -> None:
        """Add a line through the given points to `lines`, so that labels avoid it if they can."""
        corners = list(points)
        for (x1, y1), (x2, y2) in pairwise(corners):
            count = max(1, round(max(abs(x2 - x1), abs(y2 - y1)) / 4))
            for step in range(count + 1):
                x, y = x1 + (x2 - x1) * step / count, y1 + (y2 - y1) * step / count
                self.lines.append(Box(x - 1, y - 1, x + 1, y + 1))


def text_width(text: str) -> float:
    """Return the estimated width of a text in pixels. The estimate is rather too large than too
    small, so that texts do not overlap.
    """
    return FONT_PIXELS * sum(_relative_width(letter) for letter in text)


def shorten_to_width(text: str, max_width: float) -> str:
    """Return the text if it fits into `max_width` pixels. Otherwise cut it off and add "…"."""
    if text_width(text) <= max_width:
        return text
    while text and text_width(text + "…") > max_width:
        text = text[:-1]
    return text + "…"


def terminal_columns(text: str) -> int:
    """Return the number of terminal columns that a text occupies: 2 for a wide East Asian letter,
    0 for a combining character, 1 for any other.
    """
    return sum(
        0
        if unicodedata.combining(letter)
        else 2
        if unicodedata.east_asian_width(letter) in "WF"
        else 1
        for letter in text
    )


def fit_columns(text: str, columns: int, ellipsis: str = "…") -> str:
    """Cut off the text or pad it with spaces, so that it occupies exactly `columns` terminal
    columns. A text that is cut off ends with `ellipsis`.
    """
    if terminal_columns(text) > columns:
        while text and terminal_columns(text + ellipsis) > columns:
            text = text[:-1]
        text = text + ellipsis if columns >= terminal_columns(ellipsis) else ""
    return text + " " * (columns - terminal_columns(text))


def _relative_width(letter: str) -> float:
    """Return the estimated width of a letter, relative to the font size."""
    if unicodedata.combining(letter):
        return 0.0
    if unicodedata.east_asian_width(letter) in "WF":
        return 1.0
    return (
        0.4
        if letter in NARROW_LETTERS
        else 0.95
        if letter in WIDE_LETTERS
        else 0.64
        if not letter.isupper()
        else 0.72
    )
