"""Block formats: the fields of a block, the values that they stand for, and the choice of codes for
given values.

A value is scale * level + minimum, where the level is the number that a code stands for.
`pack(unpack(blocks))` returns the same bytes. `value` returns exactly the values that ggml reads
from a block. `fit` is ggml's own choice of scales and codes. `nearest_codes` finds the nearest
codes for given scales; methods that correct errors column by column need it. All functions work on
arrays of blocks.

`value` and `nearest_codes` accept numpy arrays and torch tensors. They use operations that have the
same name in both libraries, or the three functions at the end of this file.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from quant.native import ggml

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from quant.native.ggml import F32, U8

    Floats = NDArray[np.floating]
    Ints = NDArray[np.signedinteger]


@dataclass(frozen=True, slots=True)
class BlockFields:
    """The fields of many blocks. A field is None if the format does not have it.

    - `codes`: [blocks, values] as stored, starting at 0 (in Q8_0 they are signed). In formats where
      one code stands for several values: [blocks, vectors].
    - `d`: the scale of each block [blocks]; in NVFP4 of each group [blocks, groups].
    - `m`: the minimum of each block [blocks]. In formats with `mins` it is instead the factor of
      the minimums.
    - `scales`, `mins`: integers [blocks, groups]. The scale of a group is d * scales, and its
      minimum is -m * mins.
    """

    codes: "Ints"
    d: "Floats"
    m: "Floats | None" = None
    scales: "Ints | None" = None
    mins: "Ints | None" = None

    @property
    def group_count(self) -> int:
        """Number of groups in a block. A group is a set of values with one scale."""
        if self.scales is not None:
            return int(self.scales.shape[1])
        return int(self.d.shape[1]) if len(self.d.shape) > 1 else 1

    def group(self, number: int) -> "BlockFields":
        """Return group `number` of each block as fields of smaller blocks. nearest_codes() and
        value() work on them, with the columns of this group or with a single column.
        """
        codes = self.codes.reshape(len(self.codes), self.group_count, -1)[:, number]
        selected = slice(number, number + 1)
        return replace(
            self,
            codes=codes,
            d=self.d[:, selected] if len(self.d.shape) > 1 else self.d,
            scales=None if self.scales is None else self.scales[:, selected],
            mins=None if self.mins is None else self.mins[:, selected],
        )


class BlockFormat(ABC):
    """A block format. Subclasses define `name` (ggml's type name, "Q4_K"), `unpack`, `pack` and
    `levels`.
    """

    name: str

    @abstractmethod
    def unpack(self, blocks: "U8") -> BlockFields:
        """Split stored blocks [blocks, bytes] into their fields."""

    @abstractmethod
    def pack(self, fields: BlockFields) -> "U8":
        """Join fields into stored blocks [blocks, bytes], the inverse of unpack()."""

    @abstractmethod
    def levels(self, codes: "Ints") -> "F32":
        """Return the level of each code: the value that the code stands for if the scale is 1 and
        the minimum is 0. In formats where a code stands for several values, a level is a vector.
        """

    def steps(self, fields: BlockFields) -> "tuple[F32, F32 | None]":
        """Return the scale and the minimum of each group, [blocks, groups, 1] each, rounded as ggml
        rounds them. The minimum is None if the format has none.
        """
        scale = to_f32(fields.d).reshape(len(fields.codes), -1)
        if fields.scales is not None:
            scale = scale * to_f32(fields.scales)
        if fields.m is None:
            return scale[:, :, None], None
        minimum = to_f32(fields.m)[:, None]
        if fields.mins is not None:
            minimum = -(minimum * to_f32(fields.mins))
        return scale[:, :, None], minimum[:, :, None]

    def value(self, fields: BlockFields) -> "F32":
        """Return the values [blocks, values] that the blocks stand for, rounded as ggml rounds
        them.
        """
        scale, minimum = self.steps(fields)
        numbers = scale * self.levels(fields.codes).reshape(len(scale), scale.shape[1], -1)
        if minimum is not None:
            numbers = numbers + minimum
        return numbers.reshape(len(scale), -1)

    def fit(self, values: "F32", importance: "F32 | None" = None) -> BlockFields:
        """Choose scales and codes for values [blocks, values] as ggml's encoder does. `importance`
        [values] weighs the columns.

        ggml's encoder is called, because its searches add floats in a fixed order: a
        reimplementation would be slower and would match only by chance. The returned scales are
        rounded as in the file. Raises UserError for values that encode() refuses.
        """
        return self.unpack(self.encode(values, importance=importance))

    def encode(self, values: "F32", *, importance: "F32 | None" = None) -> "U8":
        """Encode values [blocks, values] with ggml. `importance` [values] weighs the columns.
        Return [blocks, bytes].
        """
        weights = (
            None if importance is None else ggml.Importance(importance[None], max(1, len(values)))
        )
        return ggml.encode(values, self.name, label=self.name, importance=weights)

    def decode(self, blocks: "U8") -> "F32":
        """Decode blocks [blocks, bytes] with ggml. Return [blocks, values]."""
        return ggml.decode(blocks, self.name, ggml.block_size(self.name).values, label=self.name)


class ScalarFormat(BlockFormat):
    """A format in which each value has its own code. Subclasses define `round_steps`."""

    @abstractmethod
    def round_steps(self, numbers: "F32") -> "Ints":
        """Return the code whose level is nearest to each number. The numbers are values divided by
        the scale, after the minimum is subtracted. They may be infinite, but not NaN.
        """

    def nearest_codes(self, values: "F32", fields: BlockFields) -> "Ints":
        """Return the nearest codes for values [blocks, values], given the scales and minimums in
        `fields`. The codes in `fields` are ignored.

        If a scale is zero, all codes mean the same, and the code of zero is returned. For the
        k-quants and MXFP4 the codes are those that ggml writes, because ggml rounds with the stored
        scales there. For other formats ggml rounds with the scale before the scale is rounded to
        F16, and the codes returned here are at least as near.
        """
        import numpy as np

        with np.errstate(over="ignore", invalid="ignore"):
            scale, minimum = self.steps(fields)
            numbers, usable = values.reshape(len(scale), scale.shape[1], -1), scale != 0
            if minimum is not None:
                numbers = numbers - minimum
            numbers = numbers * usable / (scale + ~usable)
        numbers[numbers != numbers] = 0  # NaN comes from infinity divided by infinity
        return self.round_steps(numbers).reshape(values.shape)


class LinearFormat(ScalarFormat):
    """A format with evenly spaced levels. Codes go from `low` to `high`, and the code `zero` stands
    for 0.
    """

    low = 0
    high: int
    zero = 0

    def levels(self, codes: "Ints") -> "F32":
        """Return the level of each code: its distance from the code of zero."""
        return to_f32(codes - self.zero)

    def round_steps(self, numbers: "F32") -> "Ints":
        """Return the nearest code of each number. A number halfway between two levels goes to the
        even one, as in ggml's nearest_int.
        """
        return to_i16(numbers.round().clip(self.low - self.zero, self.high - self.zero)) + self.zero


class TableFormat(ScalarFormat):
    """A format whose codes are indices into `table`, which has the levels in ascending order."""

    table: tuple[int, ...]

    def levels(self, codes: "Ints") -> "F32":
        """Return the level of each code: its entry in the table."""
        return lookup(self.table, codes)

    def round_steps(self, numbers: "F32") -> "Ints":
        """Return the nearest code of each number. A number halfway between two levels goes to the
        higher one, as in ggml's best_index_int8.
        """
        return to_i16(sum((numbers >= edge) * 1 for edge in midpoints(self.table)))


def midpoints(table: Sequence[int]) -> list[float]:
    """Return the midpoint between each two neighboring levels of a table."""
    return [(low + high) / 2 for low, high in pairwise(table)]


# Operations that have different names in numpy and torch.


def to_f32(numbers: Any) -> "F32":
    """Return a numpy array or torch tensor converted to F32."""
    floats: F32 = numbers.float() if hasattr(numbers, "float") else numbers.astype("float32")
    return floats


def to_i16(numbers: Any) -> "Ints":
    """Return a numpy array or torch tensor of whole numbers converted to I16."""
    integers: Ints = numbers.short() if hasattr(numbers, "short") else numbers.astype("int16")
    return integers


def lookup(table: "Sequence[float] | F32", codes: Any) -> "F32":
    """Return table[codes] as F32, as numpy array or torch tensor like `codes`. For each code this
    is a number, or a vector if the table is two-dimensional.
    """
    import numpy as np

    entries = (
        codes.float().new_tensor(table)
        if hasattr(codes, "new_tensor")
        else np.asarray(table, np.float32)
    )
    values: F32 = entries[codes.long() if hasattr(codes, "long") else codes]
    return values
