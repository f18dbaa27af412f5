"""Block formats: the fields of a block, the numbers that they stand for, and the choice of codes
for given numbers.

`pack(unpack(blocks))` returns the same bytes. `value` returns exactly the numbers that ggml reads
from a block. `fit` is ggml's own choice of scales and codes. `nearest_codes` finds the nearest
codes for given scales, for methods that correct errors column by column. Everything works on arrays
of blocks.

`value` and `nearest_codes` accept numpy arrays and torch tensors. They use only operations that
have the same name in both, and for all others the three functions at the end of this file.
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

    - `codes`: [blocks, values] as stored, starting at 0 (Q8_0: signed); or [blocks, vectors] in
      formats where a code stands for several values.
    - `d`: [blocks], the scale of a block (NVFP4: [blocks, groups]).
    - `m`: [blocks], the scale of the block's minimums, or its minimum itself.
    - `scales`, `mins`: [blocks, groups], the integers that d and m are multiplied with for each
      group.
    """

    codes: "Ints"
    d: "Floats"
    m: "Floats | None" = None
    scales: "Ints | None" = None
    mins: "Ints | None" = None

    @property
    def group_count(self) -> int:
        """Number of groups in a block."""
        if self.scales is not None:
            return int(self.scales.shape[1])
        return int(self.d.shape[1]) if len(self.d.shape) > 1 else 1

    def group(self, number: int) -> "BlockFields":
        """Return one group of each block, such that nearest_codes() and value() work on the columns
        of this group, or on a single column.
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
    """A block format. Subclasses define `name`, `unpack`, `pack` and `levels`."""

    name: str

    @abstractmethod
    def unpack(self, blocks: "U8") -> BlockFields:
        """Split blocks [blocks, bytes] into their fields."""

    @abstractmethod
    def pack(self, fields: BlockFields) -> "U8":
        """Join fields into blocks [blocks, bytes]."""

    @abstractmethod
    def levels(self, codes: "Ints") -> "F32":
        """Return the levels of codes, in steps of the scale: for each code a number, or a vector in
        formats where a code stands for several values.
        """

    def steps(self, fields: BlockFields) -> "tuple[F32, F32 | None]":
        """Return the step size and the minimum of each group, [blocks, groups, 1] each, rounded as
        ggml rounds them. The minimum is None if the format has none.
        """
        step = to_f32(fields.d).reshape(len(fields.codes), -1)
        if fields.scales is not None:
            step = step * to_f32(fields.scales)
        if fields.m is None:
            return step[:, :, None], None
        least = to_f32(fields.m)[:, None]
        if fields.mins is not None:
            least = -(least * to_f32(fields.mins))
        return step[:, :, None], least[:, :, None]

    def value(self, fields: BlockFields) -> "F32":
        """Return the numbers [blocks, values] that the blocks stand for, rounded as ggml rounds
        them.
        """
        step, least = self.steps(fields)
        numbers = step * self.levels(fields.codes).reshape(len(step), step.shape[1], -1)
        if least is not None:
            numbers = numbers + least
        return numbers.reshape(len(step), -1)

    def fit(self, values: "F32", importance: "F32 | None" = None) -> BlockFields:
        """Choose scales and codes for values [blocks, values], with columns weighted by
        `importance` [values].

        The choice is that of ggml's encoder, which is called for it: its searches add floats in a
        fixed order, so a reimplementation would be slower and would match only by chance. The
        returned scales are rounded as in the file. Raises UserError for values that encode()
        refuses.
        """
        return self.unpack(self.encode(values, importance=importance))

    def encode(self, values: "F32", *, importance: "F32 | None" = None) -> "U8":
        """Encode values [blocks, values] with ggml, with columns weighted by `importance` [values].
        Returns [blocks, bytes].
        """
        weights = (
            None if importance is None else ggml.Importance(importance[None], max(1, len(values)))
        )
        return ggml.encode(values, self.name, label=self.name, importance=weights)

    def decode(self, blocks: "U8") -> "F32":
        """Decode blocks [blocks, bytes] with ggml. Returns [blocks, values]."""
        return ggml.decode(blocks, self.name, ggml.block_size(self.name).values, label=self.name)


class ScalarFormat(BlockFormat):
    """A format in which each value has its own code. Subclasses define `round_steps`."""

    @abstractmethod
    def round_steps(self, numbers: "F32") -> "Ints":
        """Return the code with the level nearest to each number, where numbers are in steps of the
        scale. Numbers may be infinite, but not NaN.
        """

    def nearest_codes(self, values: "F32", fields: BlockFields) -> "Ints":
        """Return the nearest codes of values [blocks, values] on the scales of `fields`; the codes
        in `fields` are ignored.

        If a step is zero, all codes mean the same, and the code of zero is returned. For the
        k-quants and MXFP4 the result is what ggml writes, because it rounds with the stored scales
        there. For other formats ggml rounds with the scale before that is rounded to F16, and the
        codes returned here are at least as near.
        """
        import numpy as np

        with np.errstate(over="ignore", invalid="ignore"):
            step, least = self.steps(fields)
            numbers, usable = values.reshape(len(step), step.shape[1], -1), step != 0
            if least is not None:
                numbers = numbers - least
            numbers = numbers * usable / (step + ~usable)
        numbers[numbers != numbers] = 0  # NaN comes from infinity divided by infinity
        return self.round_steps(numbers).reshape(values.shape)


class LinearFormat(ScalarFormat):
    """A format with evenly spaced levels: codes from `low` to `high`, of which `zero` stands for 0."""

    low = 0
    high: int
    zero = 0

    def levels(self, codes: "Ints") -> "F32":
        """Return the distance of each code from the code of zero."""
        return to_f32(codes - self.zero)

    def round_steps(self, numbers: "F32") -> "Ints":
        """Round to codes; halves go to the even level, as in ggml's nearest_int."""
        return to_i16(numbers.round().clip(self.low - self.zero, self.high - self.zero)) + self.zero


class TableFormat(ScalarFormat):
    """A format whose codes are indices into `table`, a table of levels in ascending order."""

    table: tuple[int, ...]

    def levels(self, codes: "Ints") -> "F32":
        """Return the table entry of each code."""
        return lookup(self.table, codes)

    def round_steps(self, numbers: "F32") -> "Ints":
        """Round to codes. A number halfway between two levels goes to the higher one, as in ggml's
        best_index_int8.
        """
        return to_i16(sum((numbers >= edge) * 1 for edge in midpoints(self.table)))


def midpoints(table: Sequence[int]) -> list[float]:
    """Return the midpoints between neighboring levels of a table."""
    return [(low + high) / 2 for low, high in pairwise(table)]


# Operations that have different names in numpy and torch.


def to_f32(numbers: Any) -> "F32":
    """Return the numbers as F32."""
    floats: F32 = numbers.float() if hasattr(numbers, "float") else numbers.astype("float32")
    return floats


def to_i16(numbers: Any) -> "Ints":
    """Return integer-valued numbers as I16."""
    integers: Ints = numbers.short() if hasattr(numbers, "short") else numbers.astype("int16")
    return integers


def lookup(table: "Sequence[float] | F32", codes: Any) -> "F32":
    """Return table[codes] as F32: for each code a number, or a row if the table has rows."""
    import numpy as np

    entries = (
        codes.float().new_tensor(table)
        if hasattr(codes, "new_tensor")
        else np.asarray(table, np.float32)
    )
    values: F32 = entries[codes.long() if hasattr(codes, "long") else codes]
    return values
