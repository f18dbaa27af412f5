"""The four-bit formats whose codes are places in a table: IQ4_NL and IQ4_XS.

Layouts and table of ggml/src/ggml-common.h. It knows bytes of blocks, nothing of how scales are found.
"""

from typing import TYPE_CHECKING

from quant.formats.base import Fields, Format, halves, joined, merged, planes, stored_halves

if TYPE_CHECKING:
    from quant.formats.base import I16
    from quant.native import F32, U8

LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


class Table(Format):
    """Codes count unevenly, closer together around zero."""

    def levels(self, codes: "I16") -> "F32":
        """What the table holds for each code."""
        import numpy as np

        return np.array(LEVELS, np.float32)[codes]


class IQ4NL(Table):
    """d and sixteen bytes of low and high nibbles."""

    name = "IQ4_NL"

    def unpack(self, blocks: "U8") -> Fields:
        """Take blocks [blocks, 18] apart."""
        return Fields(planes(blocks[:, 2:], 4).reshape(-1, 32), halves(blocks[:, :2]))

    def pack(self, fields: Fields) -> "U8":
        """Put blocks together."""
        return joined(stored_halves(fields.d), merged(fields.codes.reshape(-1, 2, 16), 4))


class IQ4XS(Table):
    """d, eight scales of six bits (tops, then nibbles), and codes as in eight blocks of IQ4_NL."""

    name = "IQ4_XS"

    def unpack(self, blocks: "U8") -> Fields:
        """Take blocks [blocks, 136] apart; scales are -32 to 31."""
        tops = planes(blocks[:, 2:4, None], 2).reshape(-1, 8)
        low = planes(blocks[:, 4:8, None], 4).reshape(-1, 8)
        codes = planes(blocks[:, 8:].reshape(-1, 8, 16), 4).reshape(-1, 256)
        return Fields(codes, halves(blocks[:, :2]), scales=(low | tops << 4) - 32)

    def pack(self, fields: Fields) -> "U8":
        """Put blocks together."""
        assert fields.scales is not None
        scales = fields.scales + 32
        tops = merged((scales >> 4).reshape(-1, 2, 4, 1), 2)
        low = merged((scales & 15).reshape(-1, 4, 2, 1), 4)
        return joined(stored_halves(fields.d), tops, low, merged(fields.codes.reshape(-1, 8, 2, 16), 4))


FORMATS = (IQ4NL(), IQ4XS())
