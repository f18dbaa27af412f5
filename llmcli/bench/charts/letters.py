"""How much room words take, and where they find it. Widths are estimates: the reader's font is not
known.
"""

import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise

SIZE, LINE = 12, 16  # of text and its lines, in pixels
NARROW, WIDE = frozenset("ijl.,:;'|!()[]tfrI "), frozenset("mwMW@%±→")
AWAY = (10.0, 24.0, 40.0, 58.0)  # how far from its mark a label may stand
APART = 14.0  # from the marks of others
SIDES = ((1, 0), (-1, 0), (0, -1), (0, 1), (1, -1), (-1, -1), (1, 1), (-1, 1))


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangle."""

    left: float
    top: float
    right: float
    bottom: float

    def shared(self, other: "Box") -> float:
        """The area of what both cover."""
        across = min(self.right, other.right) - max(self.left, other.left)
        down = min(self.bottom, other.bottom) - max(self.top, other.top)
        return across * down if across > 0 and down > 0 else 0.0

    def holds(self, other: "Box") -> bool:
        """Whether the other lies within."""
        return (
            self.left <= other.left
            and self.right >= other.right
            and self.top <= other.top
            and self.bottom >= other.bottom
        )


@dataclass(frozen=True, slots=True)
class Spot:
    """Where a label stands: the box of its text, and whether a line should lead to it."""

    box: Box
    far: bool


@dataclass(slots=True)
class Room:
    """What is still free in an area. `taken` must not be covered, `lines` should not be; a label
    keeps away from other `marks` than its own, so that nobody takes it for theirs.
    """

    area: Box
    taken: list[Box] = field(default_factory=list)
    marks: list[tuple[float, float]] = field(default_factory=list)
    lines: list[Box] = field(default_factory=list)

    def place(self, text: str, x: float, y: float) -> Spot | None:
        """Take room for a label of the mark at (x, y), as near as there is some; None where there
        is none.
        """
        wide = width(text)
        for away in AWAY:
            free = []
            for across, down in SIDES:
                near = away * (0.75 if across and down else 1.0)
                left = x + across * near - (0.0 if across > 0 else wide if across < 0 else wide / 2)
                middle = y + down * (near + (LINE / 4 if not across else 0))
                box = Box(left, middle - LINE / 2, left + wide, middle + LINE / 2)
                if self.area.holds(box) and self._free(box, x, y):
                    free.append(box)
            if free:
                best = min(free, key=lambda box: sum(box.shared(one) > 0 for one in self.lines))
                self.taken.append(best)
                return Spot(best, away > AWAY[0])
        return None

    def mark(self, x: float, y: float, size: float = 6) -> None:
        """Keep the place of a mark free."""
        self.taken.append(Box(x - size, y - size, x + size, y + size))
        self.marks.append((x, y))

    def _free(self, box: Box, x: float, y: float) -> bool:
        """Whether a label of the mark at (x, y) may have a place."""
        near = Box(box.left - APART, box.top - APART / 2, box.right + APART, box.bottom + APART / 2)
        others = (
            Box(ox, oy, ox + 0.1, oy + 0.1)
            for ox, oy in self.marks
            if abs(ox - x) + abs(oy - y) > 1
        )
        return not any(box.shared(one) for one in self.taken) and not any(
            near.shared(one) for one in others
        )

    def line(self, points: Iterable[tuple[float, float]]) -> None:
        """Keep off a line where there is a choice."""
        found = list(points)
        for (x1, y1), (x2, y2) in pairwise(found):
            count = max(1, round(max(abs(x2 - x1), abs(y2 - y1)) / 4))
            for step in range(count + 1):
                x, y = x1 + (x2 - x1) * step / count, y1 + (y2 - y1) * step / count
                self.lines.append(Box(x - 1, y - 1, x + 1, y + 1))


def width(text: str) -> float:
    """About how wide a text of SIZE is, in pixels; rather too much than too little."""
    return SIZE * sum(_share(letter) for letter in text)


def cut(text: str, most: float) -> str:
    """The text, or as much of it as `most` pixels hold, with … for the rest."""
    if width(text) <= most:
        return text
    while text and width(text + "…") > most:
        text = text[:-1]
    return text + "…"


def cells(text: str) -> int:
    """Columns of a terminal that a text takes."""
    return sum(
        0
        if unicodedata.combining(letter)
        else 2
        if unicodedata.east_asian_width(letter) in "WF"
        else 1
        for letter in text
    )


def fit(text: str, columns: int, more: str = "…") -> str:
    """The text in exactly so many columns of a terminal."""
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
