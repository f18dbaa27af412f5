"""The formats with blocks of 32 values and one scale: Q4_0, Q4_1, Q5_0, Q5_1, Q8_0.

Source: layouts of ggml/src/ggml-common.h; scales without importance as in the quantize_row_…_ref
functions of ggml/src/ggml-quants.c, which use the largest values instead of a search.
"""

from abc import abstractmethod
from typing import TYPE_CHECKING

from quant.formats.base import Fields, Linear
from quant.formats.bit_packing import (
    halves,
    in_turn,
    joined,
    merged,
    planes,
    stored_halves,
    stored_in_turn,
)

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from quant.native.ggml import F32, U8


class Largest(Linear):
    """A format whose scale follows from a block's largest values if no importance is given."""

    def fit(self, values: "F32", importance: "F32 | None" = None) -> Fields:
        """Choose scales and codes for values [blocks, 32] as ggml does.

        Without importance the choice is computed here: codes are rounded with the scale before it
        becomes an F16. Values without an F16 scale, and a search by importance, are left to ggml.
        """
        import numpy as np

        if importance is not None:
            return super().fit(values, importance)
        values = np.asarray(values, np.float32)
        with np.errstate(over="ignore", invalid="ignore"):
            d, m = self.range(values)
            numbers = values if m is None else values - m[:, None]
            numbers = numbers * np.divide(1, d, out=np.zeros_like(d), where=d != 0)[:, None]
            stored, least = d.astype(np.float16), None if m is None else m.astype(np.float16)
        if not all(
            np.isfinite(part).all() for part in (stored, least, numbers) if part is not None
        ):
            return super().fit(values)
        return Fields(self.rounded(numbers).astype(np.int16), stored, least)

    @abstractmethod
    def range(self, values: "F32") -> "tuple[F32, F32 | None]":
        """Return the scale [blocks] and the minimum [blocks], or None, of values [blocks, 32]."""

    @abstractmethod
    def rounded(self, numbers: "F32") -> "F32":
        """Return the codes of numbers in steps, rounded as ggml's encoder rounds them."""


class Nibbles(Largest):
    """Q4_0, Q4_1, Q5_0 and Q5_1: d, m in the _1 types, the fifth bits in the Q5 types, sixteen
    bytes of low and high nibbles.
    """

    def __init__(self, name: str, *, least: bool, fifth: bool) -> None:
        self.name, self.least, self.fifth = name, least, fifth
        self.high = 31 if fifth else 15
        # without a minimum the middle code stands for zero
        self.zero = 0 if least else (self.high + 1) // 2

    def unpack(self, blocks: "U8") -> Fields:
        """Split blocks [blocks, 18 to 24] into fields; in the _1 types `m` is the minimum
        itself.
        """
        codes = planes(blocks[:, -16:], 4).reshape(-1, 32)
        if self.fifth:
            codes = codes | in_turn(blocks[:, -20:-16], 1) << 4
        return Fields(codes, halves(blocks[:, :2]), halves(blocks[:, 2:4]) if self.least else None)

    def pack(self, fields: Fields) -> "U8":
        """Join fields into blocks [blocks, 18 to 24]."""
        parts = [stored_halves(fields.d)]
        if self.least:
            parts.append(stored_halves(fields.m))
        if self.fifth:
            parts.append(stored_in_turn(fields.codes >> 4, 1))
        return joined(*parts, merged((fields.codes & 15).reshape(-1, 2, 16), 4))

    def range(self, values: "F32") -> "tuple[F32, F32 | None]":
        """Return scale and minimum: the _1 types span smallest to largest; in the others code 0
        stands for the value farthest from zero.
        """
        import numpy as np

        if self.least:
            lowest = _first(values, values.argmin(axis=1))
            highest = _first(values, values.argmax(axis=1))
            return (highest - lowest) / np.float32(self.high), lowest
        farthest = _first(values, np.abs(values).argmax(axis=1))
        # adding zero turns -0 into 0, which ggml starts with
        return (farthest + np.float32(0)) / np.float32(-self.zero), None

    def rounded(self, numbers: "F32") -> "F32":
        """Round to codes; halves go up."""
        import numpy as np

        codes: F32 = np.trunc(numbers + np.float32(self.zero + 0.5)).clip(self.low, self.high)
        return codes


def _first(values: "F32", places: "NDArray[np.intp]") -> "F32":
    """Return one value of each block [blocks]. `places` are the first of equal values, so that 0
    and -0 are distinguished as in ggml.
    """
    import numpy as np

    chosen: F32 = np.take_along_axis(values, places[:, None], 1)[:, 0]
    return chosen


class Bytes(Largest):
    """Q8_0: d, then 32 signed bytes."""

    name, low, high = "Q8_0", -128, 127

    def unpack(self, blocks: "U8") -> Fields:
        """Split blocks [blocks, 34] into fields; codes are signed."""
        import numpy as np

        return Fields(blocks[:, 2:].view(np.int8).astype(np.int16), halves(blocks[:, :2]))

    def pack(self, fields: Fields) -> "U8":
        """Join fields into blocks [blocks, 34]."""
        import numpy as np

        return joined(stored_halves(fields.d), fields.codes.astype(np.int8).view(np.uint8))

    def range(self, values: "F32") -> "tuple[F32, F32 | None]":
        """Return the scale that maps the value farthest from zero to 127 or -127."""
        import numpy as np

        return np.abs(values).max(axis=1) / np.float32(127), None

    def rounded(self, numbers: "F32") -> "F32":
        """Round to codes; halves go away from zero."""
        import numpy as np

        below = np.trunc(numbers)
        codes: F32 = below + np.trunc(2 * (numbers - below))
        return codes


FORMATS = (
    Nibbles("Q4_0", least=False, fifth=False),
    Nibbles("Q4_1", least=True, fifth=False),
    Nibbles("Q5_0", least=False, fifth=True),
    Nibbles("Q5_1", least=True, fifth=True),
    Bytes(),
)
