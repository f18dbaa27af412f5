"""The formats with blocks of 32 values and one scale: Q4_0, Q4_1, Q5_0, Q5_1, Q8_0.

Source: layouts of ggml/src/ggml-common.h. Without importance, scales are as in the
quantize_row_*_ref functions of ggml/src/ggml-quants.c, which compute them from a block's largest
values instead of searching.
"""

from abc import abstractmethod
from typing import TYPE_CHECKING

from quant.formats.base import BlockFields, LinearFormat
from quant.formats.bit_packing import (
    concat_bytes,
    pack_f16,
    pack_fields,
    pack_planes,
    unpack_f16,
    unpack_fields,
    unpack_planes,
)

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from quant.native.ggml import F32, U8


class RangeFormat(LinearFormat):
    """A format whose scale is computed from a block's largest values if no importance is given.
    Subclasses define `scale_and_minimum` and `round_codes`.
    """

    def fit(self, values: "F32", importance: "F32 | None" = None) -> BlockFields:
        """Choose scales and codes for values [blocks, 32] as ggml does. `importance` [32] weighs
        the columns.

        Without importance the choice is computed here: codes are rounded with the scale before it
        is rounded to F16. ggml's encoder is called for values whose scale does not fit into F16,
        and for a search by importance.
        """
        import numpy as np

        if importance is not None:
            return super().fit(values, importance)
        values = np.asarray(values, np.float32)
        with np.errstate(over="ignore", invalid="ignore"):
            d, m = self.scale_and_minimum(values)
            numbers = values if m is None else values - m[:, None]
            numbers = numbers * np.divide(1, d, out=np.zeros_like(d), where=d != 0)[:, None]
            stored_d, stored_m = d.astype(np.float16), None if m is None else m.astype(np.float16)
        if not all(
            np.isfinite(array).all() for array in (stored_d, stored_m, numbers) if array is not None
        ):
            return super().fit(values)
        return BlockFields(self.round_codes(numbers).astype(np.int16), stored_d, stored_m)

    @abstractmethod
    def scale_and_minimum(self, values: "F32") -> "tuple[F32, F32 | None]":
        """Return the scale [blocks] and the minimum [blocks] of values [blocks, 32]. The minimum is
        None in formats without one.
        """

    @abstractmethod
    def round_codes(self, numbers: "F32") -> "F32":
        """Return the codes of numbers [blocks, 32], rounded as ggml's encoder rounds them. The
        numbers are values divided by the scale, after the minimum is subtracted.
        """


class LegacyNibbles(RangeFormat):
    """Q4_0, Q4_1, Q5_0 and Q5_1, 32 values in 18, 20, 22 and 24 bytes: d, in the _1 types the
    minimum m, in the Q5 types the fifth bits of the codes, then sixteen bytes with the low four
    bits of the codes as low and high nibbles.
    """

    def __init__(self, name: str, *, has_minimum: bool, has_fifth_bit: bool) -> None:
        self.name, self.has_minimum, self.has_fifth_bit = name, has_minimum, has_fifth_bit
        self.high = 31 if has_fifth_bit else 15
        # in the types without a minimum, the middle code stands for zero
        self.zero = 0 if has_minimum else (self.high + 1) // 2

    def unpack(self, blocks: "U8") -> BlockFields:
        """Split stored blocks [blocks, 18 to 24 bytes] into their fields. In the _1 types, `m` is
        the minimum itself.
        """
        codes = unpack_planes(blocks[:, -16:], 4).reshape(-1, 32)
        if self.has_fifth_bit:
            codes = codes | unpack_fields(blocks[:, -20:-16], 1) << 4
        return BlockFields(
            codes,
            unpack_f16(blocks[:, :2]),
            unpack_f16(blocks[:, 2:4]) if self.has_minimum else None,
        )

    def pack(self, fields: BlockFields) -> "U8":
        """Join fields into stored blocks [blocks, 18 to 24 bytes]."""
        parts = [pack_f16(fields.d)]
        if self.has_minimum:
            parts.append(pack_f16(fields.m))
        if self.has_fifth_bit:
            parts.append(pack_fields(fields.codes >> 4, 1))
        return concat_bytes(*parts, pack_planes((fields.codes & 15).reshape(-1, 2, 16), 4))

    def scale_and_minimum(self, values: "F32") -> "tuple[F32, F32 | None]":
        """Return the scale [blocks] and the minimum [blocks] or None. In the _1 types the levels
        span the smallest to the largest value. In the _0 types code 0 stands for the value farthest
        from zero.
        """
        import numpy as np

        if self.has_minimum:
            lowest = _values_at(values, values.argmin(axis=1))
            highest = _values_at(values, values.argmax(axis=1))
            return (highest - lowest) / np.float32(self.high), lowest
        farthest = _values_at(values, np.abs(values).argmax(axis=1))
        # adding zero turns -0 into 0, which is the initial value in ggml
        return (farthest + np.float32(0)) / np.float32(-self.zero), None

    def round_codes(self, numbers: "F32") -> "F32":
        """Return the nearest code of each number. A number halfway between two levels is rounded
        up.
        """
        import numpy as np

        codes: F32 = np.trunc(numbers + np.float32(self.zero + 0.5)).clip(self.low, self.high)
        return codes


def _values_at(values: "F32", indices: "NDArray[np.intp]") -> "F32":
    """Return the value at the given index in each block, [blocks]. It is copied from the block
    instead of computed, so that 0 and -0 stay distinct as in ggml.
    """
    import numpy as np

    chosen: F32 = np.take_along_axis(values, indices[:, None], 1)[:, 0]
    return chosen


class Q80(RangeFormat):
    """Q8_0, 32 values in 34 bytes: d, then 32 signed bytes."""

    name, low, high = "Q8_0", -128, 127

    def unpack(self, blocks: "U8") -> BlockFields:
        """Split stored blocks [blocks, 34 bytes] into their fields. Codes are signed."""
        import numpy as np

        return BlockFields(blocks[:, 2:].view(np.int8).astype(np.int16), unpack_f16(blocks[:, :2]))

    def pack(self, fields: BlockFields) -> "U8":
        """Join fields into stored blocks [blocks, 34 bytes]."""
        import numpy as np

        return concat_bytes(pack_f16(fields.d), fields.codes.astype(np.int8).view(np.uint8))

    def scale_and_minimum(self, values: "F32") -> "tuple[F32, F32 | None]":
        """Return the scale [blocks] that maps the value farthest from zero to 127 or -127, and
        None.
        """
        import numpy as np

        return np.abs(values).max(axis=1) / np.float32(127), None

    def round_codes(self, numbers: "F32") -> "F32":
        """Return the nearest code of each number. A number halfway between two levels is rounded
        away from zero.
        """
        import numpy as np

        truncated = np.trunc(numbers)
        codes: F32 = truncated + np.trunc(2 * (numbers - truncated))
        return codes


FORMATS = (
    LegacyNibbles("Q4_0", has_minimum=False, has_fifth_bit=False),
    LegacyNibbles("Q4_1", has_minimum=True, has_fifth_bit=False),
    LegacyNibbles("Q5_0", has_minimum=False, has_fifth_bit=True),
    LegacyNibbles("Q5_1", has_minimum=True, has_fifth_bit=True),
    Q80(),
)
