"""The formats with one or two bits for each value and one scale for each block: Q1_0, Q2_0, TQ1_0,
TQ2_0.

Source: layouts of ggml/src/ggml-common.h, and the quantize_row_tq1_0_ref function of
ggml/src/ggml-quants.c.
"""

from typing import TYPE_CHECKING

from quant.formats.base import BlockFields, LinearFormat, TableFormat
from quant.formats.bit_packing import (
    concat_bytes,
    pack_f16,
    pack_fields,
    pack_two_bits,
    unpack_f16,
    unpack_fields,
    unpack_two_bits,
)

if TYPE_CHECKING:
    from quant.formats.base import Ints
    from quant.native.ggml import U8


class Q10(TableFormat):
    """Q1_0, 128 values in 18 bytes: d, then one bit for each value, which stands for -d (0) or d
    (1).
    """

    name, table = "Q1_0", (-1, 1)

    def unpack(self, blocks: "U8") -> BlockFields:
        """Split stored blocks [blocks, 18 bytes] into their fields."""
        return BlockFields(unpack_fields(blocks[:, 2:], 1), unpack_f16(blocks[:, :2]))

    def pack(self, fields: BlockFields) -> "U8":
        """Join fields into stored blocks [blocks, 18 bytes]."""
        return concat_bytes(pack_f16(fields.d), pack_fields(fields.codes, 1))


class Q20(LinearFormat):
    """Q2_0, 64 values in 18 bytes: d, then two bits for each value, which stand for -d, 0, d or
    2d.
    """

    name, high, zero = "Q2_0", 3, 1

    def unpack(self, blocks: "U8") -> BlockFields:
        """Split stored blocks [blocks, 18 bytes] into their fields."""
        return BlockFields(unpack_fields(blocks[:, 2:], 2), unpack_f16(blocks[:, :2]))

    def pack(self, fields: BlockFields) -> "U8":
        """Join fields into stored blocks [blocks, 18 bytes]."""
        return concat_bytes(pack_f16(fields.d), pack_fields(fields.codes, 2))


class TQ10(LinearFormat):
    """TQ1_0, 256 values in 54 bytes: 48 bytes with five values each, four bytes with four values
    each, then d. A value is -d, 0 or d.

    The values of a byte are the digits of a fraction 0.abcde in base three, and the byte is that
    fraction in 256ths, rounded up. A byte that this rule never produces is decoded like the byte
    that the rule produces for its digits.
    """

    name, high, zero = "TQ1_0", 2, 1

    def unpack(self, blocks: "U8") -> BlockFields:
        """Split stored blocks [blocks, 54 bytes] into their fields."""
        import numpy as np

        parts = (
            _unpack_digits(blocks[:, :32], 5),
            _unpack_digits(blocks[:, 32:48], 5),
            _unpack_digits(blocks[:, 48:52], 4),
        )
        return BlockFields(np.concatenate(parts, axis=1), unpack_f16(blocks[:, 52:]))

    def pack(self, fields: BlockFields) -> "U8":
        """Join fields into stored blocks [blocks, 54 bytes]."""
        codes = fields.codes
        parts = (
            _pack_digits(codes[:, :160], 5),
            _pack_digits(codes[:, 160:240], 5),
            _pack_digits(codes[:, 240:], 4),
        )
        return concat_bytes(*parts, pack_f16(fields.d))


class TQ20(LinearFormat):
    """TQ2_0, 256 values in 66 bytes: two bits for each value, which stand for -d, 0 or d, then d.
    Code 3 is never written; it is read as 2d.
    """

    name, high, zero = "TQ2_0", 2, 1

    def unpack(self, blocks: "U8") -> BlockFields:
        """Split stored blocks [blocks, 66 bytes] into their fields."""
        return BlockFields(unpack_two_bits(blocks[:, :64]), unpack_f16(blocks[:, 64:]))

    def pack(self, fields: BlockFields) -> "U8":
        """Join fields into stored blocks [blocks, 66 bytes]."""
        return concat_bytes(pack_two_bits(fields.codes), pack_f16(fields.d))


def _unpack_digits(stored: "U8", count: int) -> "Ints":
    """Return the first `count` base-three digits of each byte in `stored` [blocks, bytes], as
    [blocks, digits]: the first digits of all bytes, then the second ones, and so on.
    """
    import numpy as np

    remainders = (
        stored[:, None, :].astype(np.int16) * 3 ** np.arange(count, dtype=np.int16)[:, None]
    ) & 255
    return (remainders * 3 >> 8).reshape(len(stored), -1)


def _pack_digits(codes: "Ints", count: int) -> "Ints":
    """Encode base-three digits [blocks, digits] into bytes [blocks, bytes] of `count` digits each,
    the inverse of _unpack_digits().
    """
    import numpy as np

    place_values = 3 ** np.arange(4, 4 - count, -1)[:, None]
    numbers = (codes.reshape(len(codes), count, -1) * place_values).sum(axis=1)
    stored: Ints = (numbers * 256 + 242) // 243
    return stored


FORMATS = (Q10(), Q20(), TQ10(), TQ20())
