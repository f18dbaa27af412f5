"""Frozen values that describe a chart. The SVG renderer and the terminal renderer draw the same
values.
"""

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis: its title, which includes the unit, and its scale.

    `log`: equal steps are equal factors. `from_zero` False: the axis begins near the smallest
    value, as for ratios around 1; bars need an axis from zero.
    """

    title: str
    log: bool = False
    zero: bool = True


@dataclass(frozen=True, slots=True)
class Point:
    """One pair of values with an optional label and note.

    The SVG shows the label next to the mark, with the note if there is room for both. The data
    table always contains both.
    """

    x: float
    y: float
    label: str = ""
    note: str = ""

    @property
    def words(self) -> str:
        """The label and the note as one text."""
        return f"{self.label}: {self.note}" if self.note else self.label


@dataclass(frozen=True, slots=True)
class Series:
    """Points of one kind, drawn as a line, as marks, or both."""

    name: str
    points: tuple[Point, ...]
    line: bool = True
    marks: bool = True


@dataclass(frozen=True, slots=True)
class Rule:
    """A labeled line across the chart at one value of the x axis."""

    at: float
    label: str


@dataclass(frozen=True, slots=True)
class Plot:
    """A chart of two numeric axes. `description` states the content of the chart in a sentence."""

    title: str
    says: str
    x: Axis
    y: Axis
    series: tuple[Series, ...]
    rules: tuple[Rule, ...] = ()

    def __post_init__(self) -> None:
        points = [point for series in self.series for point in series.points]
        assert points and all(math.isfinite(p.x) and math.isfinite(p.y) for p in points), self.title
        assert not self.x.log or all(p.x > 0 for p in points), self.title
        assert not self.y.log or all(p.y > 0 for p in points), self.title


@dataclass(frozen=True, slots=True)
class Value:
    """One named value of a row, such as a percentile or a part of a stacked bar."""

    name: str
    value: float


@dataclass(frozen=True, slots=True)
class Row:
    """One labeled row of a chart.

    `span`: a range around the value (a deviation or an interval). `note`: text printed after the
    row.
    """

    label: str
    values: tuple[Value, ...]
    note: str = ""
    span: tuple[float, float] | None = None

    @property
    def end(self) -> float:
        """The largest value that the bar or its range reaches."""
        ends: list[float] = [sum(value.value for value in self.values), *(self.span or ())]
        return max(ends)


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows over one common axis: stacked bars from 0, or one mark for each value if `dots` is
    set.
    """

    title: str
    says: str
    axis: Axis
    rows: tuple[Row, ...]
    dots: bool = False
    rules: tuple[Rule, ...] = ()

    def __post_init__(self) -> None:
        values = [named.value for row in self.rows for named in row.values]
        assert values and all(math.isfinite(value) and value >= 0 for value in values), self.title
        assert self.dots or (self.axis.zero and not self.axis.log), (
            "bars need a linear axis from zero"
        )

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the values in order, each once."""
        return tuple(dict.fromkeys(named.name for row in self.rows for named in row.values))

    @property
    def reach(self) -> list[float]:
        """All values that the axis must include."""
        if not self.dots:
            return [*(row.end for row in self.rows), *(rule.at for rule in self.rules)]
        values = [
            end
            for row in self.rows
            for end in (*(named.value for named in row.values), *(row.span or ()))
        ]
        return [*values, *(rule.at for rule in self.rules)]


Chart = Plot | Rows


@dataclass(frozen=True, slots=True)
class Table:
    """Named columns and their cells. The columns listed in `right_aligned` contain numbers."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    right: frozenset[int] = frozenset()
