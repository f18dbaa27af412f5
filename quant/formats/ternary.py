"""The formats of one and two bits with a single scale: Q1_0, Q2_0, TQ1_0, TQ2_0.

Source: layouts of ggml/src/ggml-common.h, and the quantize_row_tq1_0_ref function of
ggml/src/ggml-quants.c.
"""

from typing import TYPE_CHECKING

from quant.formats.base import Fields, Linear, Table
from quant.formats.bit_packing import (
    halves,
    in_turn,
    joined,
    stored_halves,
    stored_in_turn,
    stored_twos,
    twos,
)

if TYPE_CHECKING:
    from quant.formats.base import Ints
    from quant.native.ggml import U8


class Q10(Table):
    """Q1_0: d, then one bit for each of 128 values, which means d or -d."""

    name, table = "Q1_0", (-1, 1)

    def unpack(self, blocks: "U8") -> Fields:
        """Split blocks [blocks, 18] into fields."""
        return Fields(in_turn(blocks[:, 2:], 1), halves(blocks[:, :2]))

    def pack(self, fields: Fields) -> "U8":
        """Join fields into blocks [blocks, 18]."""
        return joined(stored_halves(fields.d), stored_in_turn(fields.codes, 1))


class Q20(Linear):
    """Q2_0: d, then two bits for each of 64 values, which mean -d, 0, d or 2d."""

    name, high, zero = "Q2_0", 3, 1

    def unpack(self, blocks: "U8") -> Fields:
        """Split blocks [blocks, 18] into fields."""
        return Fields(in_turn(blocks[:, 2:], 2), halves(blocks[:, :2]))

    def pack(self, fields: Fields) -> "U8":
        """Join fields into blocks [blocks, 18]."""
        return joined(stored_halves(fields.d), stored_in_turn(fields.codes, 2))


class TQ10(Linear):
    """TQ1_0: five values of -d, 0 or d in each byte, four in each of the last four bytes, then d.

    A byte is the fraction 0.abcde in base three, in 256ths and rounded up. Bytes that no digits map
    to decode like one that some do.
    """

    name, high, zero = "TQ1_0", 2, 1

    def unpack(self, blocks: "U8") -> Fields:
        """Split blocks [blocks, 54] into fields."""
        import numpy as np

        parts = (
            _digits(blocks[:, :32], 5),
            _digits(blocks[:, 32:48], 5),
            _digits(blocks[:, 48:52], 4),
        )
        return Fields(np.concatenate(parts, axis=1), halves(blocks[:, 52:]))

    def pack(self, fields: Fields) -> "U8":
        """Join fields into blocks [blocks, 54]."""
        codes = fields.codes
        parts = (
            _stored_digits(codes[:, :160], 5),
            _stored_digits(codes[:, 160:240], 5),
            _stored_digits(codes[:, 240:], 4),
        )
        return joined(*parts, stored_halves(fields.d))


class TQ20(Linear):
    """TQ2_0: two bits for each of 256 values, which mean -d, 0 or d, then d. Code 3 is never
    written and reads as 2d.
    """

    name, high, zero = "TQ2_0", 2, 1

    def unpack(self, blocks: "U8") -> Fields:
        """Split blocks [blocks, 66] into fields."""
        return Fields(twos(blocks[:, :64]), halves(blocks[:, 64:]))

    def pack(self, fields: Fields) -> "U8":
        """Join fields into blocks [blocks, 66]."""
        return joined(stored_twos(fields.codes), stored_halves(fields.d))


def _digits(stored: "U8", count: int) -> "Ints":
    """Return the first `count` base-three digits of each byte [blocks, bytes]: the first digits of
    all bytes, then the second ones.
    """
    import numpy as np

    remainders = (
        stored[:, None, :].astype(np.int16) * 3 ** np.arange(count, dtype=np.int16)[:, None]
    ) & 255
    return (remainders * 3 >> 8).reshape(len(stored), -1)


def _stored_digits(codes: "Ints", count: int) -> "Ints":
    """Encode base-three digits into bytes, the inverse of _digits()."""
    import numpy as np

    place_values = 3 ** np.arange(4, 4 - count, -1)[:, None]
    numbers = (codes.reshape(len(codes), count, -1) * place_values).sum(axis=1)
    stored: Ints = (numbers * 256 + 242) // 243
    return stored


FORMATS = (Q10(), Q20(), TQ10(), TQ20())
