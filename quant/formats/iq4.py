"""The four-bit formats whose codes are indices into a table: IQ4_NL and IQ4_XS.

Source: layouts and table of ggml/src/ggml-common.h.
"""

from typing import TYPE_CHECKING

from quant.formats.base import Fields, Table
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
    from quant.native.ggml import U8

# closer together around zero
LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


class IQ4NL(Table):
    """IQ4_NL: d, then sixteen bytes of low and high nibbles."""

    name, table = "IQ4_NL", LEVELS

    def unpack(self, blocks: "U8") -> Fields:
        """Split blocks [blocks, 18] into fields."""
        return Fields(planes(blocks[:, 2:], 4).reshape(-1, 32), halves(blocks[:, :2]))

    def pack(self, fields: Fields) -> "U8":
        """Join fields into blocks [blocks, 18]."""
        return joined(stored_halves(fields.d), merged(fields.codes.reshape(-1, 2, 16), 4))


class IQ4XS(Table):
    """IQ4_XS: d, eight scales of six bits (top bits, then nibbles), then codes as in eight blocks
    of IQ4_NL.
    """

    name, table = "IQ4_XS", LEVELS

    def unpack(self, blocks: "U8") -> Fields:
        """Split blocks [blocks, 136] into fields; scales are -32 to 31."""
        tops, low = in_turn(blocks[:, 2:4], 2), in_turn(blocks[:, 4:8], 4)
        codes = planes(blocks[:, 8:].reshape(-1, 8, 16), 4).reshape(-1, 256)
        return Fields(codes, halves(blocks[:, :2]), scales=(low | tops << 4) - 32)

    def pack(self, fields: Fields) -> "U8":
        """Join fields into blocks [blocks, 136]."""
        assert fields.scales is not None
        scales = fields.scales + 32
        tops, low = stored_in_turn(scales >> 4, 2), stored_in_turn(scales & 15, 4)
        return joined(
            stored_halves(fields.d), tops, low, merged(fields.codes.reshape(-1, 8, 2, 16), 4)
        )


FORMATS = (IQ4NL(), IQ4XS())
