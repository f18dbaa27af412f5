"""Positions of labels in a chart, and the estimated width of texts. Widths are approximate, because
the font of the reader is unknown.
"""

import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise

FONT_PIXELS, LINE_PIXELS = 12, 16  # size of the font, and height of a line
NARROW_LETTERS, WIDE_LETTERS = frozenset("ijl.,:;'|!()[]tfrI "), frozenset("mwMW@%±→")
LABEL_DISTANCES = (
    10.0,
    24.0,
    40.0,
    58.0,
)  # distances in pixels of a label from its mark, tried in this order
MARK_CLEARANCE = 14.0  # minimum distance in pixels of a label from the marks of other points
LABEL_DIRECTIONS = ((1, 0), (-1, 0), (0, -1), (0, 1), (1, -1), (-1, -1), (1, 1), (-1, 1))


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangle in a picture, in pixels."""

    x_min: float
    y_min: float
    x_max: float
    y_max: float

    def overlap_area(self, other: "Box") -> float:
        """Return the area that is inside both boxes."""
        across = min(self.x_max, other.x_max) - max(self.x_min, other.x_min)
        down = min(self.y_max, other.y_max) - max(self.y_min, other.y_min)
        return across * down if across > 0 and down > 0 else 0.0

    def contains(self, other: "Box") -> bool:
        """Return whether `other` is inside this box."""
        return (
            self.x_min <= other.x_min
            and self.x_max >= other.x_max
            and self.y_min <= other.y_min
            and self.y_max >= other.y_max
        )


@dataclass(frozen=True, slots=True)
class LabelSpot:
    """The position of a label. `needs_leader`: the label is so far from its mark that a line must
    connect them.
    """

    box: Box
    needs_leader: bool


@dataclass(slots=True)
class LabelLayout:
    """The space for labels in the area of a chart.

    Labels never cover the boxes of `occupied`, and they cover as few of the boxes of `lines` as
    possible. A label keeps a distance from the `marks` of other points; otherwise it would seem to
    belong to them.
    """

    area: Box
    occupied: list[Box] = field(default_factory=list)
    marks: list[tuple[float, float]] = field(default_factory=list)
    lines: list[Box] = field(default_factory=list)

    def place_label(self, text: str, x: float, y: float) -> LabelSpot | None:
        """Find a position for a label near its mark at (x, y), and reserve the space.

        Returns None if there is no space.
        """
        label_width = text_width(text)
        for distance in LABEL_DISTANCES:
            free = []
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
                if self.area.contains(box) and self._free(box, x, y):
                    free.append(box)
            if free:
                chosen = min(
                    free, key=lambda box: sum(box.overlap_area(line) > 0 for line in self.lines)
                )
                self.occupied.append(chosen)
                return LabelSpot(chosen, distance > LABEL_DISTANCES[0])
        return None

    def add_mark(self, x: float, y: float, size: float = 6) -> None:
        """Reserve the space of a mark, so that no label covers it."""
        self.occupied.append(Box(x - size, y - size, x + size, y + size))
        self.marks.append((x, y))

    def _free(self, box: Box, x: float, y: float) -> bool:
        """Return whether this box is free for the label of the mark at (x, y)."""
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
        """Reserve a line, which labels cover only if there is no other space."""
        corners = list(points)
        for (x1, y1), (x2, y2) in pairwise(corners):
            count = max(1, round(max(abs(x2 - x1), abs(y2 - y1)) / 4))
            for step in range(count + 1):
                x, y = x1 + (x2 - x1) * step / count, y1 + (y2 - y1) * step / count
                self.lines.append(Box(x - 1, y - 1, x + 1, y + 1))


def text_width(text: str) -> float:
    """Return the estimated width of a text in pixels, which is more often too large than too small."""
    return FONT_PIXELS * sum(_share(letter) for letter in text)


def shorten_to_width(text: str, max_width: float) -> str:
    """Return the text if it fits into `max_width` pixels. Otherwise cut it off and add "…"."""
    if text_width(text) <= max_width:
        return text
    while text and text_width(text + "…") > max_width:
        text = text[:-1]
    return text + "…"


def terminal_columns(text: str) -> int:
    """Return the number of terminal columns that a text occupies."""
    return sum(
        0
        if unicodedata.combining(letter)
        else 2
        if unicodedata.east_asian_width(letter) in "WF"
        else 1
        for letter in text
    )


def fit_columns(text: str, columns: int, ellipsis: str = "…") -> str:
    """Return the text with exactly `columns` terminal columns: cut off or padded with spaces."""
    if terminal_columns(text) > columns:
        while text and terminal_columns(text + ellipsis) > columns:
            text = text[:-1]
        text = text + ellipsis if columns >= terminal_columns(ellipsis) else ""
    return text + " " * (columns - terminal_columns(text))


def _share(letter: str) -> float:
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
