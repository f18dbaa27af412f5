"""What a picture shows, in numbers: frozen values that the page (svg.py) and the terminal
(terminal.py) both draw.
"""

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Axis:
    """What is counted along an axis, with its unit; `log`: equal steps are equal factors. Not
    `zero`: it begins near the least value, as for ratios around 1; nothing with a length may stand
    on it.
    """

    title: str
    log: bool = False
    zero: bool = True


@dataclass(frozen=True, slots=True)
class Point:
    """One pair of values; the label stands beside it where there is room, the note behind that
    where there is more. The table has both.
    """

    x: float
    y: float
    label: str = ""
    note: str = ""

    @property
    def words(self) -> str:
        """The label with its note."""
        return f"{self.label}: {self.note}" if self.note else self.label


@dataclass(frozen=True, slots=True)
class Series:
    """Points of one kind: joined by a line, marked, or both."""

    name: str
    points: tuple[Point, ...]
    line: bool = True
    marks: bool = True


@dataclass(frozen=True, slots=True)
class Rule:
    """A line across the picture at one value of x, with its word."""

    at: float
    label: str


@dataclass(frozen=True, slots=True)
class Plot:
    """Two measured axes. `says` is the picture in a sentence, for those who do not see it."""

    title: str
    says: str
    x: Axis
    y: Axis
    series: tuple[Series, ...]
    rules: tuple[Rule, ...] = ()

    def __post_init__(self) -> None:
        points = [point for one in self.series for point in one.points]
        assert points and all(math.isfinite(p.x) and math.isfinite(p.y) for p in points), self.title
        assert not self.x.log or all(p.x > 0 for p in points), self.title
        assert not self.y.log or all(p.y > 0 for p in points), self.title


@dataclass(frozen=True, slots=True)
class Value:
    """One named value of a row: a percentile, a part of a stack."""

    name: str
    value: float


@dataclass(frozen=True, slots=True)
class Row:
    """One thing and its values; `span`: a range told with them (a deviation, an interval), `note`:
    words behind it.
    """

    label: str
    values: tuple[Value, ...]
    note: str = ""
    span: tuple[float, float] | None = None

    @property
    def end(self) -> float:
        """How far a bar reaches, its range too."""
        ends: list[float] = [sum(one.value for one in self.values), *(self.span or ())]
        return max(ends)


@dataclass(frozen=True, slots=True)
class Rows:
    """Things below one another over one axis from 0: bars whose values are stacked, or with `dots`
    a mark a value.
    """

    title: str
    says: str
    axis: Axis
    rows: tuple[Row, ...]
    dots: bool = False
    rules: tuple[Rule, ...] = ()

    def __post_init__(self) -> None:
        values = [one.value for row in self.rows for one in row.values]
        assert values and all(math.isfinite(value) and value >= 0 for value in values), self.title
        assert self.dots or (self.axis.zero and not self.axis.log), (
            "a bar has no length without a 0"
        )

    @property
    def names(self) -> tuple[str, ...]:
        """What the values are called, each once, in their order."""
        return tuple(dict.fromkeys(one.name for row in self.rows for one in row.values))

    @property
    def reach(self) -> list[float]:
        """Values that the axis must hold."""
        if not self.dots:
            return [*(row.end for row in self.rows), *(rule.at for rule in self.rules)]
        shown = [
            end
            for row in self.rows
            for end in (*(one.value for one in row.values), *(row.span or ()))
        ]
        return [*shown, *(rule.at for rule in self.rules)]


Chart = Plot | Rows


@dataclass(frozen=True, slots=True)
class Table:
    """Named columns; those in `right` hold numbers."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    right: frozenset[int] = frozenset()
