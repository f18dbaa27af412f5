"""Settings of `--method search` for each format: the block's groups, the starts and effort of the
search, and the weights of values.

`value_spread` gives large values more weight, as in ggml. Whether a format uses it was decided by
the KL divergence from an unquantized model: weights by importance alone give a lower weighted error
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
    """The effort of a search. Each of the `starts` (first guesses of a scale) is improved `rounds`
    times (group_scales.py). Then there is one pass over the superblocks for each entry of
    `scale_offsets`: the entry has the offsets that are tried around each integer scale
    (superblock_scales.py).
    """

    starts: tuple[float, ...]
    rounds: int = 2
    scale_offsets: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class FormatSearchSettings:
    """The search settings of a format with blocks of `block_values` values in `groups` groups.

    `scale_range` is the range of the integer scales, None if the format has none. `max_minimum` is
    the largest allowed minimum, None if the format has no minimums. `numpy_effort` is used in
    numpy, `native_effort` in our C code and on a GPU, which are faster. If `value_spread` is not 0,
    the weight of a value x is its importance times sqrt(value_spread + x² / mean of x² in its
    block), nearly as in ggml; else it is the importance alone.
    """

    block_values: int
    groups: int
    scale_range: tuple[int, int] | None
    max_minimum: float | None
    numpy_effort: SearchEffort
    native_effort: SearchEffort
    value_spread: float = 0.0

    def effective_spread(self, importance: "Importance | None") -> float:
        """Return the value_spread to use. Without importance it is never 0, because all values
        would have the same weight.
        """
        return self.value_spread if importance else self.value_spread or 1.0

    def block_importance(self, vector: "F32") -> "F32":
        """Return the importance [blocks of a row, values] of each column relative to the largest
        importance in its block, and at least MIN_IMPORTANCE. `vector` is the importance [columns].
        """
        import numpy as np

        blocks = vector.reshape(-1, self.block_values)
        largest = blocks.max(1, keepdims=True)
        shares = np.where(largest > 0, blocks, 1) / np.where(largest > 0, largest, 1)
        return np.maximum(shares, MIN_IMPORTANCE).astype(np.float32)

    def importance_array(self, importance: "Importance | None", rows: int, columns: int) -> "F32":
        """Return block_importance() for `rows` rows of `columns` values, as an array [values of a
        group, groups of a block, rows, blocks of a row]. It is all ones without importance.
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
    """Return `count` evenly spaced numbers from `low` to `high`."""
    return tuple(low + (high - low) * step / (count - 1) for step in range(count))


def _starts(low: float, high: float, count: int, negative_count: int) -> tuple[float, ...]:
    """Return `count` starts from `low` to `high`, then `negative_count` negative starts over the
    same range.

    A positive start puts the value farthest from zero on the longer side of the range of levels (-8
    in -8 .. 7), a negative start on the shorter side.
    """
    return (
        *_linspace(low, high, count),
        *(-start for start in _linspace(low, high, negative_count)),
    )


# Offsets that a pass over the superblocks tries around each integer scale.
WIDE_OFFSETS, ADJACENT_OFFSETS, NO_OFFSETS = (-2, -1, 1, 2), (-1, 1), ()
NUMPY_OFFSETS = (WIDE_OFFSETS, NO_OFFSETS, NO_OFFSETS)
NATIVE_OFFSETS = (WIDE_OFFSETS, ADJACENT_OFFSETS, NO_OFFSETS)
ANY_MINIMUM = 3e38  # the largest minimum where every minimum is allowed
SEARCH_SETTINGS = {
    "Q2_K": FormatSearchSettings(
        block_values=256,
        groups=16,
        scale_range=(0, 15),
        max_minimum=0.0,
        numpy_effort=SearchEffort(_linspace(0.7, 1.3, 6), 2, NUMPY_OFFSETS),
        native_effort=SearchEffort(_linspace(0.6, 1.3, 13), 2, NATIVE_OFFSETS),
        value_spread=1.0,
    ),
    "Q3_K": FormatSearchSettings(
        block_values=256,
        groups=16,
        scale_range=(-32, 31),
        max_minimum=None,
        numpy_effort=SearchEffort(
            (0.8, 1.0, 1.2, -0.8, -1.0, -1.2), 1, (ADJACENT_OFFSETS, NO_OFFSETS)
        ),
        native_effort=SearchEffort(_starts(0.7, 1.3, 9, 9), 1, NATIVE_OFFSETS),
        value_spread=2.0,
    ),
    "Q4_K": FormatSearchSettings(
        block_values=256,
        groups=8,
        scale_range=(0, 63),
        max_minimum=0.0,
        numpy_effort=SearchEffort(_linspace(0.94, 1.06, 6), 2, NUMPY_OFFSETS),
        native_effort=SearchEffort(_linspace(0.9, 1.1, 17), 2, NATIVE_OFFSETS),
        value_spread=2.0,
    ),
    "Q5_K": FormatSearchSettings(
        block_values=256,
        groups=8,
        scale_range=(0, 63),
        max_minimum=0.0,
        numpy_effort=SearchEffort(_linspace(0.97, 1.03, 6), 2, NUMPY_OFFSETS),
        native_effort=SearchEffort(_linspace(0.95, 1.05, 17), 2, NATIVE_OFFSETS),
        value_spread=2.0,
    ),
    "Q6_K": FormatSearchSettings(
        block_values=256,
        groups=16,
        scale_range=(-128, 127),
        max_minimum=None,
        numpy_effort=SearchEffort((0.97, 1.0, 1.03), 1, (WIDE_OFFSETS, NO_OFFSETS)),
        native_effort=SearchEffort(
            (*_linspace(0.95, 1.05, 9), -0.97, -1.0, -1.03), 1, NATIVE_OFFSETS
        ),
    ),
    "Q4_0": FormatSearchSettings(
        block_values=32,
        groups=1,
        scale_range=None,
        max_minimum=None,
        numpy_effort=SearchEffort(_starts(0.8, 1.1, 7, 2), 1),
        native_effort=SearchEffort(_starts(0.8, 1.15, 15, 6), 1),
        value_spread=1.0,
    ),
    "Q4_1": FormatSearchSettings(
        block_values=32,
        groups=1,
        scale_range=None,
        max_minimum=ANY_MINIMUM,
        numpy_effort=SearchEffort(_linspace(0.91, 1.09, 10)),
        native_effort=SearchEffort(_linspace(0.9, 1.1, 17)),
        value_spread=1.0,
    ),
    "Q5_0": FormatSearchSettings(
        block_values=32,
        groups=1,
        scale_range=None,
        max_minimum=None,
        numpy_effort=SearchEffort(_linspace(0.9, 1.05, 6), 1),
        native_effort=SearchEffort(_starts(0.9, 1.05, 12, 4), 1),
        value_spread=1.0,
    ),
    "Q5_1": FormatSearchSettings(
        block_values=32,
        groups=1,
        scale_range=None,
        max_minimum=ANY_MINIMUM,
        numpy_effort=SearchEffort(_linspace(0.955, 1.045, 12)),
        native_effort=SearchEffort(_linspace(0.95, 1.05, 17)),
        value_spread=1.0,
    ),
    "Q8_0": FormatSearchSettings(
        block_values=32,
        groups=1,
        scale_range=None,
        max_minimum=None,
        numpy_effort=SearchEffort((0.995, 1.0, 1.005), 1),
        native_effort=SearchEffort(_linspace(0.95, 1.0, 6), 1),
    ),
}
