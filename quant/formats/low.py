"""The formats of one and two bits with a single scale: Q1_0, Q2_0, TQ1_0, TQ2_0.

Layouts of ggml/src/ggml-common.h, and the quantize_row_tq1_0_ref function of
ggml/src/ggml-quants.c. It knows bytes of blocks, nothing of how scales are found.
"""

from typing import TYPE_CHECKING

from quant.formats.base import Fields, Linear, Table
from quant.formats.bits import (
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
    from quant.native import U8


class Q10(Table):
    """d, and a bit for each of 128 values: d or -d."""

    name, table = "Q1_0", (-1, 1)

    def unpack(self, blocks: "U8") -> Fields:
        """Take blocks [blocks, 18] apart."""
        return Fields(in_turn(blocks[:, 2:], 1), halves(blocks[:, :2]))

    def pack(self, fields: Fields) -> "U8":
        """Put blocks together."""
        return joined(stored_halves(fields.d), stored_in_turn(fields.codes, 1))


class Q20(Linear):
    """d, and two bits for each of 64 values: -d, 0, d or 2d."""

    name, high, zero = "Q2_0", 3, 1

    def unpack(self, blocks: "U8") -> Fields:
        """Take blocks [blocks, 18] apart."""
        return Fields(in_turn(blocks[:, 2:], 2), halves(blocks[:, :2]))

    def pack(self, fields: Fields) -> "U8":
        """Put blocks together."""
        return joined(stored_halves(fields.d), stored_in_turn(fields.codes, 2))


class TQ10(Linear):
    """Five values of -d, 0 or d to a byte, four in each of the last four, then d.

    A byte is the fraction 0.abcde in base three, in 256ths and rounded up; other bytes read as one
    of these do.
    """

    name, high, zero = "TQ1_0", 2, 1

    def unpack(self, blocks: "U8") -> Fields:
        """Take blocks [blocks, 54] apart."""
        import numpy as np

        parts = (
            _digits(blocks[:, :32], 5),
            _digits(blocks[:, 32:48], 5),
            _digits(blocks[:, 48:52], 4),
        )
        return Fields(np.concatenate(parts, axis=1), halves(blocks[:, 52:]))

    def pack(self, fields: Fields) -> "U8":
        """Put blocks together."""
        many, few, rest = fields.codes[:, :160], fields.codes[:, 160:240], fields.codes[:, 240:]
        parts = _stored_digits(many, 5), _stored_digits(few, 5), _stored_digits(rest, 4)
        return joined(*parts, stored_halves(fields.d))


class TQ20(Linear):
    """Two bits for each of 256 values, then d: -d, 0 or d; code 3 is not written, and reads as 2d."""

    name, high, zero = "TQ2_0", 2, 1

    def unpack(self, blocks: "U8") -> Fields:
        """Take blocks [blocks, 66] apart."""
        return Fields(twos(blocks[:, :64]), halves(blocks[:, 64:]))

    def pack(self, fields: Fields) -> "U8":
        """Put blocks together."""
        return joined(stored_twos(fields.codes), stored_halves(fields.d))


def _digits(stored: "U8", count: int) -> "Ints":
    """The first `count` digits of each byte [blocks, bytes]: first digits of all bytes, then second
    ones.
    """
    import numpy as np

    rest = (
        stored[:, None, :].astype(np.int16) * 3 ** np.arange(count, dtype=np.int16)[:, None]
    ) & 255
    return (rest * 3 >> 8).reshape(len(stored), -1)


def _stored_digits(codes: "Ints", count: int) -> "Ints":
    """The reverse of _digits()."""
    import numpy as np

    worth = 3 ** np.arange(4, 4 - count, -1)[:, None]
    numbers = (codes.reshape(len(codes), count, -1) * worth).sum(axis=1)
    stored: Ints = (numbers * 256 + 242) // 243
    return stored


FORMATS = (Q10(), Q20(), TQ10(), TQ20())
