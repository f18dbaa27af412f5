"""The data of a chart, as immutable values. The SVG renderer and the terminal renderer draw the
same values.
"""

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis. `title`: includes the unit.

    `is_log`: a logarithmic axis, on which equal distances are equal ratios. `from_zero`: the axis
    starts at zero, which bars need; if False, it starts near the smallest value, which suits ratios
    around 1.
    """

    title: str
    is_log: bool = False
    from_zero: bool = True


@dataclass(frozen=True, slots=True)
class Point:
    """One point of a plot, with an optional label and note.

    The SVG shows the label next to the point, and the note if there is space for both. The data
    table always contains both.
    """

    x: float
    y: float
    label: str = ""
    note: str = ""

    @property
    def full_label(self) -> str:
        """The label and the note as one text."""
        return f"{self.label}: {self.note}" if self.note else self.label


@dataclass(frozen=True, slots=True)
class Series:
    """Points that belong together, drawn as a line (`line`), as marks (`marks`), or as both."""

    name: str
    points: tuple[Point, ...]
    line: bool = True
    marks: bool = True


@dataclass(frozen=True, slots=True)
class ReferenceLine:
    """A vertical line with a label at one position of the x axis."""

    position: float
    label: str


@dataclass(frozen=True, slots=True)
class Plot:
    """A chart with two numeric axes. `description`: the content of the chart in one sentence."""

    title: str
    description: str
    x: Axis
    y: Axis
    series: tuple[Series, ...]
    reference_lines: tuple[ReferenceLine, ...] = ()

    def __post_init__(self) -> None:
        points = [point for series in self.series for point in series.points]
        assert points and all(math.isfinite(p.x) and math.isfinite(p.y) for p in points), self.title
        assert not self.x.is_log or all(p.x > 0 for p in points), self.title
        assert not self.y.is_log or all(p.y > 0 for p in points), self.title


@dataclass(frozen=True, slots=True)
class NamedValue:
    """One value of a row with its name, such as a percentile or a part of a stacked bar."""

    name: str
    value: float


@dataclass(frozen=True, slots=True)
class ChartRow:
    """One row of a chart, with a label.

    `value_range`: a range drawn around the value, such as a deviation or an interval. `note`: text
    after the row.
    """

    label: str
    values: tuple[NamedValue, ...]
    note: str = ""
    value_range: tuple[float, float] | None = None

    @property
    def largest_value(self) -> float:
        """The largest number that the drawing of this row reaches."""
        ends: list[float] = [sum(value.value for value in self.values), *(self.value_range or ())]
        return max(ends)


@dataclass(frozen=True, slots=True)
class RowChart:
    """A chart of rows over one common axis. Each row is a stacked bar from 0 or, with
    `draws_marks`, one mark for each value.
    """

    title: str
    description: str
    axis: Axis
    rows: tuple[ChartRow, ...]
    draws_marks: bool = False
    reference_lines: tuple[ReferenceLine, ...] = ()

    def __post_init__(self) -> None:
        values = [named.value for row in self.rows for named in row.values]
        assert values and all(math.isfinite(value) and value >= 0 for value in values), self.title
        assert self.draws_marks or (self.axis.from_zero and not self.axis.is_log), (
            "bars need a linear axis from zero"
        )

    @property
    def value_names(self) -> tuple[str, ...]:
        """The names of all values, each once, in the order of their first use."""
        return tuple(dict.fromkeys(named.name for row in self.rows for named in row.values))

    @property
    def axis_values(self) -> list[float]:
        """All numbers that the axis must include."""
        if not self.draws_marks:
            return [
                *(row.largest_value for row in self.rows),
                *(rule.position for rule in self.reference_lines),
            ]
        values = [
            end
            for row in self.rows
            for end in (*(named.value for named in row.values), *(row.value_range or ()))
        ]
        return [*values, *(rule.position for rule in self.reference_lines)]


Chart = Plot | RowChart


@dataclass(frozen=True, slots=True)
class Table:
    """A table. `right_aligned`: the columns that contain numbers."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    right_aligned: frozenset[int] = frozenset()

    @property
    def right_columns(self) -> tuple[str, ...]:
        """The names of the right-aligned columns."""
        return tuple(self.columns[index] for index in sorted(self.right_aligned))
