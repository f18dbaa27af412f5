"""The four-bit formats whose codes are indices into a table of unevenly spaced levels: IQ4_NL and
IQ4_XS.

Source: layouts and table of ggml/src/ggml-common.h.
"""

from typing import TYPE_CHECKING

from quant.formats.base import BlockFields, TableFormat
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
    from quant.native.ggml import U8

# The levels are closer together around zero, where most weights are.
IQ4_LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


class IQ4NL(TableFormat):
    """IQ4_NL, 32 values in 18 bytes: d, then sixteen bytes with the codes as low and high
    nibbles.
    """

    name, table = "IQ4_NL", IQ4_LEVELS

    def unpack(self, blocks: "U8") -> BlockFields:
        """Split stored blocks [blocks, 18 bytes] into their fields."""
        return BlockFields(
            unpack_planes(blocks[:, 2:], 4).reshape(-1, 32), unpack_f16(blocks[:, :2])
        )

    def pack(self, fields: BlockFields) -> "U8":
        """Join fields into stored blocks [blocks, 18 bytes]."""
        return concat_bytes(pack_f16(fields.d), pack_planes(fields.codes.reshape(-1, 2, 16), 4))


class IQ4XS(TableFormat):
    """IQ4_XS, 256 values in 136 bytes: d, eight scales of six bits (first their top bits, then
    their low nibbles), then codes as in eight blocks of IQ4_NL.
    """

    name, table = "IQ4_XS", IQ4_LEVELS

    def unpack(self, blocks: "U8") -> BlockFields:
        """Split stored blocks [blocks, 136 bytes] into their fields. Scales are -32 to 31."""
        top_bits, low_nibbles = unpack_fields(blocks[:, 2:4], 2), unpack_fields(blocks[:, 4:8], 4)
        codes = unpack_planes(blocks[:, 8:].reshape(-1, 8, 16), 4).reshape(-1, 256)
        return BlockFields(
            codes, unpack_f16(blocks[:, :2]), scales=(low_nibbles | top_bits << 4) - 32
        )

    def pack(self, fields: BlockFields) -> "U8":
        """Join fields into stored blocks [blocks, 136 bytes]."""
        assert fields.scales is not None
        scales = fields.scales + 32
        top_bits, low_nibbles = pack_fields(scales >> 4, 2), pack_fields(scales & 15, 4)
        return concat_bytes(
            pack_f16(fields.d),
            top_bits,
            low_nibbles,
            pack_planes(fields.codes.reshape(-1, 8, 2, 16), 4),
        )


FORMATS = (IQ4NL(), IQ4XS())
