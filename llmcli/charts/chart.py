"""Frozen values that describe a chart. The SVG renderer and the terminal renderer draw the same
values.
"""

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis: its title, which includes the unit, and its scale.

    `is_log`: equal steps are equal factors. `from_zero` False: the axis begins near the smallest
    value, as for ratios around 1; bars need an axis from zero.
    """

    title: str
    is_log: bool = False
    from_zero: bool = True


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
    def full_label(self) -> str:
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
class ReferenceLine:
    """A labeled line across the chart at one value of the x axis."""

    position: float
    label: str


@dataclass(frozen=True, slots=True)
class Plot:
    """A chart of two numeric axes. `description` states the content of the chart in a sentence."""

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
    """One named value of a row, such as a percentile or a part of a stacked bar."""

    name: str
    value: float


@dataclass(frozen=True, slots=True)
class ChartRow:
    """One labeled row of a chart.

    `value_range`: a range around the value (a deviation or an interval). `note`: text printed after
    the row.
    """

    label: str
    values: tuple[NamedValue, ...]
    note: str = ""
    value_range: tuple[float, float] | None = None

    @property
    def largest_value(self) -> float:
        """The largest value that the bar or its range reaches."""
        ends: list[float] = [sum(value.value for value in self.values), *(self.value_range or ())]
        return max(ends)


@dataclass(frozen=True, slots=True)
class RowChart:
    """Rows over one common axis: stacked bars from 0, or one mark for each value if
    `draws_marks` is set.
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
        """The names of the values in order, each once."""
        return tuple(dict.fromkeys(named.name for row in self.rows for named in row.values))

    @property
    def axis_values(self) -> list[float]:
        """All values that the axis must include."""
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
    """Named columns and their cells. The columns listed in `right_aligned` contain numbers."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    right_aligned: frozenset[int] = frozenset()

    @property
    def right_columns(self) -> tuple[str, ...]:
        """The names of the right-aligned columns."""
        return tuple(self.columns[index] for index in sorted(self.right_aligned))
