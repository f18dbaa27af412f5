"""Estimated text widths, and free places for labels in a chart. The reader's font is unknown, so
widths are approximate.
"""

import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise

SIZE, LINE = 12, 16  # of text and of a line, in pixels
NARROW, WIDE = frozenset("ijl.,:;'|!()[]tfrI "), frozenset("mwMW@%±→")
AWAY = (10.0, 24.0, 40.0, 58.0)  # distances of a label from its mark, in pixels, nearest first
APART = 14.0  # minimum distance of a label from the marks of other points, in pixels
SIDES = ((1, 0), (-1, 0), (0, -1), (0, 1), (1, -1), (-1, -1), (1, 1), (-1, 1))


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangle in pixels."""

    left: float
    top: float
    right: float
    bottom: float

    def shared(self, other: "Box") -> float:
        """Return the area that both boxes cover."""
        across = min(self.right, other.right) - max(self.left, other.left)
        down = min(self.bottom, other.bottom) - max(self.top, other.top)
        return across * down if across > 0 and down > 0 else 0.0

    def holds(self, other: "Box") -> bool:
        """Return whether the other box lies inside this one."""
        return (
            self.left <= other.left
            and self.right >= other.right
            and self.top <= other.top
            and self.bottom >= other.bottom
        )


@dataclass(frozen=True, slots=True)
class Spot:
    """The position of a label. `needs_leader`: draw a line from the mark to the label."""

    box: Box
    far: bool


@dataclass(slots=True)
class Room:
    """The free space of a chart area.

    Labels never cover the boxes of `occupied`, and avoid `lines` where possible. A label keeps its
    distance from the `marks` of other points, so that it is not read as theirs.
    """

    area: Box
    taken: list[Box] = field(default_factory=list)
    marks: list[tuple[float, float]] = field(default_factory=list)
    lines: list[Box] = field(default_factory=list)

    def place(self, text: str, x: float, y: float) -> Spot | None:
        """Reserve space for the label of the mark at (x, y), as near to it as possible.

        Returns None if there is no space.
        """
        label_width = width(text)
        for distance in AWAY:
            free = []
            for step_x, step_y in SIDES:
                offset = distance * (0.75 if step_x and step_y else 1.0)
                left = (
                    x
                    + step_x * offset
                    - (0.0 if step_x > 0 else label_width if step_x < 0 else label_width / 2)
                )
                middle = y + step_y * (offset + (LINE / 4 if not step_x else 0))
                box = Box(left, middle - LINE / 2, left + label_width, middle + LINE / 2)
                if self.area.holds(box) and self._free(box, x, y):
                    free.append(box)
            if free:
                chosen = min(free, key=lambda box: sum(box.shared(line) > 0 for line in self.lines))
                self.taken.append(chosen)
                return Spot(chosen, distance > AWAY[0])
        return None

    def mark(self, x: float, y: float, size: float = 6) -> None:
        """Reserve the space of a mark."""
        self.taken.append(Box(x - size, y - size, x + size, y + size))
        self.marks.append((x, y))

    def _free(self, box: Box, x: float, y: float) -> bool:
        """Return whether the label of the mark at (x, y) may be placed in this box."""
        near = Box(box.left - APART, box.top - APART / 2, box.right + APART, box.bottom + APART / 2)
        other_marks = (
            Box(mark_x, mark_y, mark_x + 0.1, mark_y + 0.1)
            for mark_x, mark_y in self.marks
            if abs(mark_x - x) + abs(mark_y - y) > 1
        )
        return not any(box.shared(occupied) for occupied in self.taken) and not any(
            near.shared(occupied) for occupied in other_marks
        )

    def line(self, points: Iterable[tuple[float, float]]) -> None:
        """Make labels avoid a line where possible."""
        corners = list(points)
        for (x1, y1), (x2, y2) in pairwise(corners):
            count = max(1, round(max(abs(x2 - x1), abs(y2 - y1)) / 4))
            for step in range(count + 1):
                x, y = x1 + (x2 - x1) * step / count, y1 + (y2 - y1) * step / count
                self.lines.append(Box(x - 1, y - 1, x + 1, y + 1))


def width(text: str) -> float:
    """Return the estimated width of a text in pixels. Widths are rather too large than too
    small.
    """
    return SIZE * sum(_share(letter) for letter in text)


def cut(text: str, most: float) -> str:
    """Return the text, shortened to `max_width` pixels with a trailing … if it is longer."""
    if width(text) <= most:
        return text
    while text and width(text + "…") > most:
        text = text[:-1]
    return text + "…"


def cells(text: str) -> int:
    """Return the number of terminal columns that a text occupies."""
    return sum(
        0
        if unicodedata.combining(letter)
        else 2
        if unicodedata.east_asian_width(letter) in "WF"
        else 1
        for letter in text
    )


def fit(text: str, columns: int, more: str = "…") -> str:
    """Return the text cut or padded to exactly `columns` terminal columns."""
    if cells(text) > columns:
        while text and cells(text + more) > columns:
            text = text[:-1]
        text = text + more if columns >= cells(more) else ""
    return text + " " * (columns - cells(text))


def _share(letter: str) -> float:
    if unicodedata.combining(letter):
        return 0.0
    if unicodedata.east_asian_width(letter) in "WF":
        return 1.0
    return (
        0.4
        if letter in NARROW
        else 0.95
        if letter in WIDE
        else 0.64
        if not letter.isupper()
        else 0.72
    )
