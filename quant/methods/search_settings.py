"""Settings of the search for each format: groups, starts, effort, and the weights of values.

`value_spread` gives large values more weight, as in ggml. Whether a format uses it was chosen by
the divergence from an unquantized model: weights by importance alone give a lower weighted error
for every format, but a higher divergence for the low-bit formats. Q6_K and Q8_0 work without it, as
in ggml.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quant.native.ggml import F32, Importance

MIN_IMPORTANCE = 1e-6  # smallest importance of a column relative to the largest in its block


@dataclass(frozen=True, slots=True)
class SearchEffort:
    """The effort of a search: `starts`, each improved `rounds` times (group_scales.py), and then
    one pass over the superblocks for each entry of `scale_offsets`, which has the offsets to try
    around each integer scale (superblock_scales.py).
    """

    starts: tuple[float, ...]
    rounds: int = 2
    scale_offsets: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class FormatSearchSettings:
    """The search settings of a format with blocks of `block_values` values in `groups` groups.

    `scale_range` is the range of the integer scales, None if the format has none; `max_minimum` is
    the largest allowed minimum, None if the format has no minimums. `numpy_effort` is used in
    numpy, `native_effort` in our C code and on a GPU. If `value_spread` is not 0, the weight of a
    value x is its importance times sqrt(value_spread + x² / mean of x² in its block), nearly as in
    ggml; else it is the importance alone.
    """

    block_values: int
    groups: int
    scale_range: tuple[int, int] | None
    max_minimum: float | None
    numpy_effort: SearchEffort
    native_effort: SearchEffort
    value_spread: float = 0.0

    def effective_spread(self, importance: "Importance | None") -> float:
        """Return the value_spread to use. Without importance, it is never 0."""
        return self.value_spread if importance else self.value_spread or 1.0

    def block_importance(self, vector: "F32") -> "F32":
        """Return the importance of columns relative to the largest in each block, [blocks of a row,
        values].
        """
        import numpy as np

        blocks = vector.reshape(-1, self.block_values)
        largest = blocks.max(1, keepdims=True)
        shares = np.where(largest > 0, blocks, 1) / np.where(largest > 0, largest, 1)
        return np.maximum(shares, MIN_IMPORTANCE).astype(np.float32)

    def importance_array(self, importance: "Importance | None", rows: int, columns: int) -> "F32":
        """Return block_importance() for every row as an array [values of a group, groups of a
        block, rows, blocks of a row].
        """
        import numpy as np

        count, size = columns // self.block_values, self.block_values // self.groups
        weights = np.ones((size, self.groups, rows, count), np.float32)
        for first, last, vector in importance.spans(0, rows) if importance else ():
            transposed = (
                self.block_importance(vector).reshape(count, self.groups, size).transpose(2, 1, 0)
            )
            weights[:, :, first:last] = transposed[:, :, None]
        return weights


def _linspace(low: float, high: float, count: int) -> tuple[float, ...]:
    return tuple(low + (high - low) * step / (count - 1) for step in range(count))


def _starts(low: float, high: float, count: int, turned: int) -> tuple[float, ...]:
    """Return `count` starts with the value farthest from zero on the longer side of the levels'
    range, then `turned` negative starts with it on the shorter side.
    """
    return (*_linspace(low, high, count), *(-start for start in _linspace(low, high, turned)))


WIDE_OFFSETS, ADJACENT_OFFSETS, NO_OFFSETS = (-2, -1, 1, 2), (-1, 1), ()
ANY_MINIMUM = 3e38  # a minimum may have any size
SEARCH_SETTINGS = {
    "Q2_K": FormatSearchSettings(
        256, 16, (0, 15), 0.0, value_spread=1.0,
        numpy_effort=SearchEffort(_linspace(0.7, 1.3, 6), 2, (WIDE_OFFSETS, NO_OFFSETS, NO_OFFSETS)),
        native_effort=SearchEffort(_linspace(0.6, 1.3, 13), 2, (WIDE_OFFSETS, ADJACENT_OFFSETS, NO_OFFSETS)),
    ),
    "Q3_K": FormatSearchSettings(
        256, 16, (-32, 31), None, value_spread=2.0,
        numpy_effort=SearchEffort((0.8, 1.0, 1.2, -0.8, -1.0, -1.2), 1, (ADJACENT_OFFSETS, NO_OFFSETS)),
        native_effort=SearchEffort(_starts(0.7, 1.3, 9, 9), 1, (WIDE_OFFSETS, ADJACENT_OFFSETS, NO_OFFSETS)),
    ),
    "Q4_K": FormatSearchSettings(
        256, 8, (0, 63), 0.0, value_spread=2.0,
        numpy_effort=SearchEffort(_linspace(0.94, 1.06, 6), 2, (WIDE_OFFSETS, NO_OFFSETS, NO_OFFSETS)),
        native_effort=SearchEffort(_linspace(0.9, 1.1, 17), 2, (WIDE_OFFSETS, ADJACENT_OFFSETS, NO_OFFSETS)),
    ),
    "Q5_K": FormatSearchSettings(
        256, 8, (0, 63), 0.0, value_spread=2.0,
        numpy_effort=SearchEffort(_linspace(0.97, 1.03, 6), 2, (WIDE_OFFSETS, NO_OFFSETS, NO_OFFSETS)),
        native_effort=SearchEffort(_linspace(0.95, 1.05, 17), 2, (WIDE_OFFSETS, ADJACENT_OFFSETS, NO_OFFSETS)),
    ),
    "Q6_K": FormatSearchSettings(
        256, 16, (-128, 127), None,
        numpy_effort=SearchEffort((0.97, 1.0, 1.03), 1, (WIDE_OFFSETS, NO_OFFSETS)),
        native_effort=SearchEffort((*_linspace(0.95, 1.05, 9), -0.97, -1.0, -1.03), 1, (WIDE_OFFSETS, ADJACENT_OFFSETS, NO_OFFSETS)),
    ),
    "Q4_0": FormatSearchSettings(
        32, 1, None, None, value_spread=1.0,
        numpy_effort=SearchEffort(_starts(0.8, 1.1, 7, 2), 1), native_effort=SearchEffort(_starts(0.8, 1.15, 15, 6), 1),
    ),
    "Q4_1": FormatSearchSettings(
        32, 1, None, ANY_MINIMUM, value_spread=1.0,
        numpy_effort=SearchEffort(_linspace(0.91, 1.09, 10)), native_effort=SearchEffort(_linspace(0.9, 1.1, 17)),
    ),
    "Q5_0": FormatSearchSettings(
        32, 1, None, None, value_spread=1.0,
        numpy_effort=SearchEffort(_linspace(0.9, 1.05, 6), 1), native_effort=SearchEffort(_starts(0.9, 1.05, 12, 4), 1),
    ),
    "Q5_1": FormatSearchSettings(
        32, 1, None, ANY_MINIMUM, value_spread=1.0,
        numpy_effort=SearchEffort(_linspace(0.955, 1.045, 12)), native_effort=SearchEffort(_linspace(0.95, 1.05, 17)),
    ),
    "Q8_0": FormatSearchSettings(
        32, 1, None, None,
        numpy_effort=SearchEffort((0.995, 1.0, 1.005), 1), native_effort=SearchEffort(_linspace(0.95, 1.0, 6), 1),
    ),
}  # fmt: skip
