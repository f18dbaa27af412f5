"""What a block format is: the fields of its blocks, what numbers they stand for, and which codes
numbers get.

`pack(unpack(blocks))` is the same bytes; `value` gives what every reader of the file will see, to
the last bit. `fit` is ggml's own choice of scales and codes; `code` finds the nearest codes where
the scales are given, as a method needs that corrects its errors from column to column. All of it is
arithmetic on arrays of blocks: no rows, no tensors.

`value` and `code` take numpy arrays and torch tensors: they use what both spell alike, and the
three functions at the end of this file for what they do not.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from quant import native

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from quant.native import F32, U8

    Floats = NDArray[np.floating]
    Ints = NDArray[np.signedinteger]


@dataclass(frozen=True, slots=True)
class Fields:
    """The fields of many blocks.

    `codes` [blocks, values] as stored, from 0 up (Q8_0: signed); [blocks, vectors] where a code
    stands for several values. `d` [blocks] is the scale of a block (NVFP4: [blocks, groups]), `m`
    [blocks] the scale of its minimums or the minimum itself; `scales` and `mins` [blocks, groups]
    are the whole numbers that d and m are multiplied with, group by group. None where the format
    has no such field.
    """

    codes: "Ints"
    d: "Floats"
    m: "Floats | None" = None
    scales: "Ints | None" = None
    mins: "Ints | None" = None

    @property
    def groups(self) -> int:
        """How many groups a block has."""
        if self.scales is not None:
            return int(self.scales.shape[1])
        return int(self.d.shape[1]) if len(self.d.shape) > 1 else 1

    def group(self, number: int) -> "Fields":
        """One group of each block, with which code() and value() work on its columns, or on a
        single one of them.
        """
        codes = self.codes.reshape(len(self.codes), self.groups, -1)[:, number]
        own = slice(number, number + 1)
        return replace(
            self,
            codes=codes,
            d=self.d[:, own] if len(self.d.shape) > 1 else self.d,
            scales=None if self.scales is None else self.scales[:, own],
            mins=None if self.mins is None else self.mins[:, own],
        )


class Format(ABC):
    """A block format. A leaf gives `name`, `unpack`, `pack` and `levels`."""

    name: str

    @abstractmethod
    def unpack(self, blocks: "U8") -> Fields:
        """Take blocks [blocks, bytes] apart."""

    @abstractmethod
    def pack(self, fields: Fields) -> "U8":
        """Put blocks [blocks, bytes] together."""

    @abstractmethod
    def levels(self, codes: "Ints") -> "F32":
        """What codes count, in steps of the scale: a number, or several, for each."""

    def steps(self, fields: Fields) -> "tuple[F32, F32 | None]":
        """The size of a step and what is added to all of them, [blocks, groups, 1], rounded as ggml
        rounds them.
        """
        step = wide(fields.d).reshape(len(fields.codes), -1)
        if fields.scales is not None:
            step = step * wide(fields.scales)
        if fields.m is None:
            return step[:, :, None], None
        least = wide(fields.m)[:, None]
        if fields.mins is not None:
            least = -(least * wide(fields.mins))
        return step[:, :, None], least[:, :, None]

    def value(self, fields: Fields) -> "F32":
        """The numbers [blocks, values] that the blocks stand for, rounded as ggml rounds them."""
        step, least = self.steps(fields)
        numbers = step * self.levels(fields.codes).reshape(len(step), step.shape[1], -1)
        if least is not None:
            numbers = numbers + least
        return numbers.reshape(len(step), -1)

    def fit(self, values: "F32", importance: "F32 | None" = None) -> Fields:
        """Scales and codes for values [blocks, values], each column weighed by `importance`
        [values].

        What ggml's encoder makes of them, taken apart: its searches try a scale nineteen times and
        more and add floats in a fixed order, so a second one would be slower, and equal only by
        luck. The scales are those that the file will hold, not what they were before they were
        rounded. Refuses what encode() refuses.
        """
        return self.unpack(self.encode(values, importance=importance))

    def encode(self, values: "F32", *, importance: "F32 | None" = None) -> "U8":
        """ggml's own choice for values [blocks, values], each column weighed by `importance`
        [values].
        """
        weights = (
            None if importance is None else native.Importance(importance[None], max(1, len(values)))
        )
        return native.encode(values, self.name, label=self.name, importance=weights)

    def decode(self, blocks: "U8") -> "F32":
        """ggml's own reading of blocks [blocks, bytes]."""
        return native.decode(blocks, self.name, native.block(self.name).values, label=self.name)


class Scalar(Format):
    """A format in which each value has a code of its own. A leaf gives `nearest`."""

    @abstractmethod
    def nearest(self, numbers: "F32") -> "Ints":
        """The code whose level is nearest to each number; numbers may be infinite, but not NaN."""

    def code(self, values: "F32", fields: Fields) -> "Ints":
        """The codes of values [blocks, values] that are nearest on the scales of `fields`; its
        codes are not read.

        Where a step is zero all codes mean the same, and it is the code of zero. In the k-quants
        and in MXFP4 these are the codes that ggml writes, for there it rounds with the scales as
        they are stored. In the others it rounds with the scale before it became an F16: these are
        as near or nearer.
        """
        import numpy as np

        with np.errstate(over="ignore", invalid="ignore"):
            step, least = self.steps(fields)
            numbers, usable = values.reshape(len(step), step.shape[1], -1), step != 0
            if least is not None:
                numbers = numbers - least
            numbers = numbers * usable / (step + ~usable)
        numbers[numbers != numbers] = 0  # NaN, or infinity by infinity
        return self.nearest(numbers).reshape(values.shape)


class Linear(Scalar):
    """Codes from `low` to `high` count evenly, and `zero` is the code of zero."""

    low = 0
    high: int
    zero = 0

    def levels(self, codes: "Ints") -> "F32":
        """Steps away from the code of zero."""
        return wide(codes - self.zero)

    def nearest(self, numbers: "F32") -> "Ints":
        """Halves go to the even level, as in ggml's nearest_int."""
        return whole(numbers.round().clip(self.low - self.zero, self.high - self.zero)) + self.zero


class Table(Scalar):
    """Codes are places in `table`, whose numbers rise."""

    table: tuple[int, ...]

    def levels(self, codes: "Ints") -> "F32":
        """What the table holds for each code."""
        return looked_up(self.table, codes)

    def nearest(self, numbers: "F32") -> "Ints":
        """A number halfway between two goes to the higher, as in ggml's best_index_int8."""
        return whole(sum((numbers >= edge) * 1 for edge in halfway(self.table)))


def halfway(table: Sequence[int]) -> list[float]:
    """The points halfway between neighbours."""
    return [(low + high) / 2 for low, high in pairwise(table)]


# What numpy and torch spell differently.


def wide(numbers: Any) -> "F32":
    """The same numbers as F32."""
    wider: F32 = numbers.float() if hasattr(numbers, "float") else numbers.astype("float32")
    return wider


def whole(numbers: Any) -> "Ints":
    """The same numbers, which are whole ones, as I16."""
    counted: Ints = numbers.short() if hasattr(numbers, "short") else numbers.astype("int16")
    return counted


def looked_up(table: "Sequence[float] | F32", codes: Any) -> "F32":
    """table[codes] as F32: a number, or a row of the table, for each code."""
    import numpy as np

    known = (
        codes.float().new_tensor(table)
        if hasattr(codes, "new_tensor")
        else np.asarray(table, np.float32)
    )
    found: F32 = known[codes.long() if hasattr(codes, "long") else codes]
    return found
