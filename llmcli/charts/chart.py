"""The content of charts and tables, as immutable dataclasses without any drawing code. SVG
pictures, terminal text and data tables are all made from these dataclasses.
"""

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis of a chart. `title`: text next to the axis, with the unit. `is_log`: use a
    logarithmic scale. `from_zero`: a linear scale starts at 0; if False, it starts near the
    smallest value, which is better for values such as ratios around 1.
    """

    title: str
    is_log: bool = False
    from_zero: bool = True


@dataclass(frozen=True, slots=True)
class Point:
    """A point of a plot at (x, y), with an optional label and an optional note.

    A picture shows the label and the note beside the point if there is space, otherwise the label
    alone, otherwise neither. The data table always contains both.
    """

    x: float
    y: float
    label: str = ""
    note: str = ""

    @property
    def full_label(self) -> str:
        """The text "LABEL: NOTE", or the label alone if there is no note."""
        return f"{self.label}: {self.note}" if self.note else self.label


@dataclass(frozen=True, slots=True)
class Series:
    """Points of a plot with a common name and color. `line`: connect them with a line. `marks`:
    draw a mark at each point.
    """

    name: str
    points: tuple[Point, ...]
    line: bool = True
    marks: bool = True


@dataclass(frozen=True, slots=True)
class ReferenceLine:
    """A vertical line at the value `position` of the x axis, with a label. Marks a limit or a
    comparison value.
    """

    position: float
    label: str


@dataclass(frozen=True, slots=True)
class Plot:
    """A chart of series of points with two numeric axes. `description`: one sentence that says what
    the chart shows, also for screen readers.

    All numbers must be finite, and positive on a logarithmic axis.
    """

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
    """A value in a ChartRow, such as a percentile or a segment of a stacked bar. Values with the
    same name have the same color in all rows of a chart.
    """

    name: str
    value: float


@dataclass(frozen=True, slots=True)
class ChartRow:
    """A row of a RowChart: one bar, or one line of marks.

    `label`: text before the row. `note`: text after the row. `value_range`: lowest and highest
    value of an error bar, such as a standard deviation or a confidence interval.
    """

    label: str
    values: tuple[NamedValue, ...]
    note: str = ""
    value_range: tuple[float, float] | None = None

    @property
    def largest_value(self) -> float:
        """The largest number that a bar or the error bar of this row reaches. A stacked bar reaches
        the sum of the row's values.
        """
        largest: float = max([sum(value.value for value in self.values), *(self.value_range or ())])
        return largest


@dataclass(frozen=True, slots=True)
class RowChart:
    """A chart of horizontal rows with a common x axis. A row is a stacked bar that starts at 0. If
    `draws_marks` is set, a row is instead a line with one mark for each value.

    `description`: see Plot. All values must be finite and not negative.
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
        """The distinct names of all values, in the order of their first use. The index of a name
        determines its color and mark.
        """
        return tuple(dict.fromkeys(named.name for row in self.rows for named in row.values))

    @property
    def axis_values(self) -> list[float]:
        """All numbers that must be between the limits of the x axis."""
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
    """A table of texts. `right_aligned`: indices of the columns that contain numbers."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    right_aligned: frozenset[int] = frozenset()

    @property
    def right_columns(self) -> tuple[str, ...]:
        """The names of the right-aligned columns."""
        return tuple(self.columns[index] for index in sorted(self.right_aligned))
