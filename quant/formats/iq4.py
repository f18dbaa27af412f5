"""The four-bit formats whose codes are places in a table: IQ4_NL and IQ4_XS.

Layouts and table of ggml/src/ggml-common.h. It knows bytes of blocks, nothing of how scales are
found.
"""

from typing import TYPE_CHECKING

from quant.formats.base import Fields, Table
from quant.formats.bits import (
    halves,
    in_turn,
    joined,
    merged,
    planes,
    stored_halves,
    stored_in_turn,
)

if TYPE_CHECKING:
    from quant.native import U8

LEVELS = (
    -127,
    -104,
    -83,
    -65,
    -49,
    -35,
    -22,
    -10,
    1,
    13,
    25,
    38,
    53,
    69,
    89,
    113,
)  # closer around zero


class IQ4NL(Table):
    """d and sixteen bytes of low and high nibbles."""

    name, table = "IQ4_NL", LEVELS

    def unpack(self, blocks: "U8") -> Fields:
        """Take blocks [blocks, 18] apart."""
        return Fields(planes(blocks[:, 2:], 4).reshape(-1, 32), halves(blocks[:, :2]))

    def pack(self, fields: Fields) -> "U8":
        """Put blocks together."""
        return joined(stored_halves(fields.d), merged(fields.codes.reshape(-1, 2, 16), 4))


class IQ4XS(Table):
    """d, eight scales of six bits (tops, then nibbles), and codes as in eight blocks of IQ4_NL."""

    name, table = "IQ4_XS", LEVELS

    def unpack(self, blocks: "U8") -> Fields:
        """Take blocks [blocks, 136] apart; scales are -32 to 31."""
        tops, low = in_turn(blocks[:, 2:4], 2), in_turn(blocks[:, 4:8], 4)
        codes = planes(blocks[:, 8:].reshape(-1, 8, 16), 4).reshape(-1, 256)
        return Fields(codes, halves(blocks[:, :2]), scales=(low | tops << 4) - 32)

    def pack(self, fields: Fields) -> "U8":
        """Put blocks together."""
        assert fields.scales is not None
        scales = fields.scales + 32
        tops, low = stored_in_turn(scales >> 4, 2), stored_in_turn(scales & 15, 4)
        return joined(
            stored_halves(fields.d), tops, low, merged(fields.codes.reshape(-1, 8, 2, 16), 4)
        )


FORMATS = (IQ4NL(), IQ4XS())
