"""The grids of the evenly spaced formats, column-major: each row of the weight is a column of the
array.

A panel is [columns, rows]: the values of one column of the weight are adjacent, so that a step from
column to column works on long vectors. Scales come from the search of `--method search`.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from quant.methods.search import asking, stepped
from quant.methods.search_settings import GRIDS, SLIGHT
from quant.methods.search_settings import Grid as Form
from quant.native import ggml
from quant.native.array_backends import Array, Numpy, Ops

if TYPE_CHECKING:
    from quant.formats.base import Linear


@dataclass(frozen=True)
class Kind:
    """The block layout of a format: `block_columns` values in `groups`, levels `low` to `high`
    around the code of zero, and the ranges of the integer scales and minimums, None where the
    format has none.
    """

    form: Form
    low: int
    high: int

    @staticmethod
    def of(format: "Linear") -> "Kind":
        """Return the layout of a format. Columns are weighted by their importance alone, without
        the value spread.
        """
        return Kind(
            replace(GRIDS[format.name], spread=0.0),
            format.low - format.zero,
            format.high - format.zero,
        )

    @property
    def size(self) -> int:
        """Number of columns of a block."""
        return self.form.values

    @property
    def groups(self) -> int:
        """Number of groups of a block."""
        return self.form.groups

    @property
    def span(self) -> int:
        """Number of columns of a group."""
        return self.form.values // self.form.groups

    @property
    def scales(self) -> tuple[int, int] | None:
        """Range of the integer scales; None where scales are not integers."""
        return self.form.whole

    @property
    def mins(self) -> int | None:
        """The largest minimum; None where minimums are not integers."""
        return None if self.form.most is None or self.form.whole is None else self.form.whole[1]

    def bounds(self, ops: Ops) -> tuple[Array, Array]:
        """Return the lowest and the highest level in the type that ops.bound needs."""
        import numpy as np

        return (
            (np.float32(self.low), np.float32(self.high))
            if isinstance(ops, Numpy)
            else (self.low, self.high)
        )

    @cached_property
    def asked(self) -> ggml.Searching:
        """Settings of the scale search in C."""
        return asking(self.form, self.low, self.high, 0.0)


@dataclass(frozen=True)
class Grid:
    """One block of each row: `d` and `m` [rows] are F16 numbers, `scales` and `mins` [groups, rows]
    integers.
    """

    kind: Kind
    d: Any
    m: Any = None
    scales: Any = None
    mins: Any = None

    def steps(self) -> tuple[Any, Any]:
        """Return step and minimum [groups, rows] of each group, rounded as ggml rounds them."""
        step = self.d[None] if self.scales is None else self.d * self.scales
        if self.m is None:
            return step, None
        return step, self.m[None] if self.mins is None else -(self.m * self.mins)

    def value(self, levels: Any) -> Any:
        """Return the values that levels [columns, rows] stand for."""
        step, least = self.steps()
        values = levels.reshape(self.kind.groups, -1, levels.shape[1]) * step[:, None]
        if least is not None:
            values += least[:, None]
        return values.reshape(levels.shape)


def scaled(kind: Kind, values: Array, weights: Array, ops: Ops) -> Grid:
    """Search scales and minimums for the values [size, rows] of a block, columns weighted by
    `weights` [size].
    """
    importance = weights / weights.max()
    importance = ops.where(importance > SLIGHT, importance, SLIGHT + 0 * importance)
    if isinstance(ops, Numpy) and ggml.searches():
        return _scaled_in_c(kind, values, importance)
    rows = values.shape[1]
    x = values.reshape(kind.groups, kind.span, rows).swapaxes(0, 1)
    w = importance.reshape(kind.groups, kind.span).swapaxes(0, 1)[:, :, None] + ops.zeros(
        kind.span, kind.groups, rows
    )
    effort = kind.form.brief if isinstance(ops, Numpy) else kind.form.long
    _, steps = stepped(x + ops.zeros(*x.shape), w, kind.form, (kind.low, kind.high), ops, effort)
    return Grid(kind, *steps)


def _scaled_in_c(kind: Kind, values: Array, weights: Array) -> Grid:
    import numpy as np

    found = ggml.search(np.ascontiguousarray(values.T), weights[None], kind.asked)
    m = found.m if kind.form.most is not None else None
    if kind.scales is None:
        return Grid(kind, found.d, m)
    scales, mins = (part.T.astype(np.float32) for part in (found.scales, found.mins))
    return Grid(kind, found.d, m, scales, mins if m is not None else None)
