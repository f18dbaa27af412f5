"""The grids (scales and minimums) of the formats with evenly spaced levels, for algorithms that go
from column to column.

A panel is a transposed part of a weight, [columns, rows]: the values in one column of the weight
are adjacent in memory, so that operations on a column work on long vectors. Scales come from the
search of `--method search`.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from quant.methods.search import native_search_settings, search_scales
from quant.methods.search_settings import MIN_IMPORTANCE, SEARCH_SETTINGS, FormatSearchSettings
from quant.native import feedback_kernels, ggml
from quant.native.array_backends import Array, ArrayBackend, NumpyBackend

if TYPE_CHECKING:
    from quant.formats.base import LinearFormat


@dataclass(frozen=True)
class ColumnFormat:
    """The block layout of a format with evenly spaced levels: the number of columns in a block and
    in a group, the range of levels relative to the code of zero (`low` to `high`), and the ranges
    of the integer scales and minimums.
    """

    settings: FormatSearchSettings
    low: int
    high: int

    @staticmethod
    def from_format(format: "LinearFormat") -> "ColumnFormat":
        """Return the layout of a format. In its searches, columns are weighted by their importance
        alone: `value_spread` is not used.
        """
        return ColumnFormat(
            replace(SEARCH_SETTINGS[format.name], value_spread=0.0),
            format.low - format.zero,
            format.high - format.zero,
        )

    @property
    def block_columns(self) -> int:
        """Number of columns in a block."""
        return self.settings.block_values

    @property
    def groups(self) -> int:
        """Number of groups in a block."""
        return self.settings.groups

    @property
    def group_columns(self) -> int:
        """Number of columns in a group."""
        return self.settings.block_values // self.settings.groups

    @property
    def scale_range(self) -> tuple[int, int] | None:
        """Range of the integer scales; None if the format has no integer scales."""
        return self.settings.scale_range

    @property
    def max_min(self) -> int | None:
        """The largest integer minimum; None if the format has no integer minimums."""
        return (
            None
            if self.settings.max_minimum is None or self.settings.scale_range is None
            else self.settings.scale_range[1]
        )

    def bounds(self, ops: ArrayBackend) -> tuple[Array, Array]:
        """Return the lowest and the highest level in the form that clip_in_place() of the backend
        accepts.
        """
        import numpy as np

        return (
            (np.float32(self.low), np.float32(self.high))
            if isinstance(ops, NumpyBackend)
            else (self.low, self.high)
        )

    @cached_property
    def layout(self) -> feedback_kernels.GridLayout:
        """The layout of a block in our C code for the loops over columns."""
        return feedback_kernels.GridLayout(
            self.block_columns,
            self.group_columns,
            (self.low, self.high),
            self.scale_range or (0, 0),
            self.max_min or 0,
        )

    @cached_property
    def native_settings(self) -> ggml.ScaleSearchSettings:
        """Settings of the scale search in our C code."""
        return native_search_settings(self.settings, self.low, self.high, 0.0)


@dataclass(frozen=True)
class ColumnGrid:
    """The scales of one block of columns, for each row of a panel: `d` and `m` [rows] are F16
    numbers, `scales` and `mins` [groups, rows] are integers. A field is None if the format does not
    have it.
    """

    format: ColumnFormat
    d: Any
    m: Any = None
    scales: Any = None
    mins: Any = None

    def steps(self) -> tuple[Any, Any]:
        """Return the scale and the minimum of each group [groups, rows], rounded as ggml rounds
        them. The minimum is None if the format has none.
        """
        scale = self.d[None] if self.scales is None else self.d * self.scales
        if self.m is None:
            return scale, None
        return scale, self.m[None] if self.mins is None else -(self.m * self.mins)

    def value(self, levels: Any) -> Any:
        """Return the values [columns, rows] that levels [columns, rows] stand for."""
        scale, minimum = self.steps()
        values = levels.reshape(self.format.groups, -1, levels.shape[1]) * scale[:, None]
        if minimum is not None:
            values += minimum[:, None]
        return values.reshape(levels.shape)


def search_column_grid(
    format: ColumnFormat, values: Array, weights: Array, ops: ArrayBackend
) -> ColumnGrid:
    """Search scales and minimums for the values [block columns, rows] of a block. Columns are
    weighted by `weights` [block columns].
    """
    importance = weights / weights.max()
    importance = ops.where(importance > MIN_IMPORTANCE, importance, MIN_IMPORTANCE + 0 * importance)
    if isinstance(ops, NumpyBackend) and ggml.native_search():
        return _search_grid_in_c(format, values, importance)
    rows = values.shape[1]
    x = values.reshape(format.groups, format.group_columns, rows).swapaxes(0, 1)
    w = importance.reshape(format.groups, format.group_columns).swapaxes(0, 1)[
        :, :, None
    ] + ops.zeros(format.group_columns, format.groups, rows)
    effort = (
        format.settings.numpy_effort
        if isinstance(ops, NumpyBackend)
        else format.settings.native_effort
    )
    _, scales = search_scales(
        x + ops.zeros(*x.shape), w, format.settings, (format.low, format.high), ops, effort
    )
    return ColumnGrid(format, *scales)


def _search_grid_in_c(format: ColumnFormat, values: Array, weights: Array) -> ColumnGrid:
    """Return what search_column_grid() returns, from the search in our C code."""
    import numpy as np

    result = ggml.run_search(np.ascontiguousarray(values.T), weights[None], format.native_settings)
    m = result.m if format.settings.max_minimum is not None else None
    if format.scale_range is None:
        return ColumnGrid(format, result.d, m)
    scales, mins = (integers.T.astype(np.float32) for integers in (result.scales, result.mins))
    return ColumnGrid(format, result.d, m, scales, mins if m is not None else None)
