"""The k-quants: Q2_K, Q3_K, Q4_K, Q5_K and Q6_K. A block (superblock) has 256 values, and each
group of 16 or 32 values has an integer scale.

Source: layouts of ggml/src/ggml-common.h and the dequantize_row functions of
ggml/src/ggml-quants.c.
"""

from typing import TYPE_CHECKING

from quant.formats.base import BlockFields, LinearFormat
from quant.formats.bit_packing import (
    concat_bytes,
    pack_f16,
    pack_planes,
    pack_two_bits,
    unpack_f16,
    unpack_planes,
    unpack_two_bits,
)

if TYPE_CHECKING:
    from quant.formats.base import Ints
    from quant.native.ggml import U8


def _unpack_one_bit(stored: "U8") -> "Ints":
    """Unpack one-bit fields, [blocks, 32 bytes] -> [blocks, 256]: value j is bit j // 32 of byte j
    % 32.
    """
    return unpack_planes(stored, 1).reshape(-1, 256)


class Q2K(LinearFormat):
    """Q2_K, 256 values in 84 bytes: sixteen bytes with a scale (low nibble) and a minimum (high
    nibble), two-bit codes, d, then m, the factor of the minimums.
    """

    name, high = "Q2_K", 3

    def unpack(self, blocks: "U8") -> BlockFields:
        """Split stored blocks [blocks, 84 bytes] into their fields. Scales and mins are 0 to 15."""
        pairs = unpack_planes(blocks[:, :16], 4)
        d, m = unpack_f16(blocks[:, 80:82]), unpack_f16(blocks[:, 82:84])
        return BlockFields(unpack_two_bits(blocks[:, 16:80]), d, m, pairs[:, 0], pairs[:, 1])

    def pack(self, fields: BlockFields) -> "U8":
        """Join fields into stored blocks [blocks, 84 bytes]."""
        import numpy as np

        assert fields.scales is not None and fields.mins is not None
        pairs = pack_planes(np.stack([fields.scales, fields.mins], 1), 4)
        return concat_bytes(
            pairs, pack_two_bits(fields.codes), pack_f16(fields.d), pack_f16(fields.m)
        )


class Q3K(LinearFormat):
    """Q3_K, 256 values in 110 bytes: the third bits of the codes, their two low bits, sixteen
    scales of six bits, then d.
    """

    name, high, zero = "Q3_K", 7, 4

    def unpack(self, blocks: "U8") -> BlockFields:
        """Split stored blocks [blocks, 110 bytes] into their fields. Scales are -32 to 31."""
        codes = unpack_two_bits(blocks[:, 32:96]) | _unpack_one_bit(blocks[:, :32]) << 2
        low_bits = unpack_planes(blocks[:, 96:104], 4).reshape(-1, 16)
        top_bits = unpack_planes(blocks[:, 104:108], 2).reshape(-1, 16)
        return BlockFields(
            codes, unpack_f16(blocks[:, 108:]), scales=(low_bits | top_bits << 4) - 32
        )

    def pack(self, fields: BlockFields) -> "U8":
        """Join fields into stored blocks [blocks, 110 bytes]."""
        assert fields.scales is not None
        scales = fields.scales + 32
        third_bits, low_bits = (
            pack_planes((fields.codes >> 2).reshape(-1, 8, 32), 1),
            pack_two_bits(fields.codes & 3),
        )
        low_scales, top_scales = (
            pack_planes((scales & 15).reshape(-1, 2, 8), 4),
            pack_planes((scales >> 4).reshape(-1, 4, 4), 2),
        )
        return concat_bytes(third_bits, low_bits, low_scales, top_scales, pack_f16(fields.d))


class Q45K(LinearFormat):
    """Q4_K and Q5_K, 256 values in 144 and 176 bytes: d, m (the factor of the minimums), eight
    scales and eight minimums of six bits each, in Q5_K the fifth bits of the codes, then the low
    nibbles of the codes.
    """

    def __init__(self, name: str, *, has_fifth_bit: bool) -> None:
        self.name, self.has_fifth_bit, self.high = name, has_fifth_bit, 31 if has_fifth_bit else 15

    def unpack(self, blocks: "U8") -> BlockFields:
        """Split stored blocks [blocks, 144 or 176 bytes] into their fields. Scales and mins are 0
        to 63.
        """
        import numpy as np

        codes = unpack_planes(blocks[:, -128:].reshape(-1, 4, 32), 4).reshape(-1, 256)
        if self.has_fifth_bit:
            codes = codes | _unpack_one_bit(blocks[:, 16:48]) << 4
        # Twelve bytes: scales 0 to 3, minimums 0 to 3, then the low nibbles of scales and minimums
        # 4 to 7, whose top two bits are above the six bits in the first eight bytes.
        first_scales, first_mins, last_nibbles = (
            blocks[:, at : at + 4].astype(np.int16) for at in (4, 8, 12)
        )
        scales = np.concatenate(
            [first_scales & 63, (last_nibbles & 15) | (first_scales >> 6) << 4], 1
        )
        mins = np.concatenate([first_mins & 63, (last_nibbles >> 4) | (first_mins >> 6) << 4], 1)
        return BlockFields(
            codes, unpack_f16(blocks[:, :2]), unpack_f16(blocks[:, 2:4]), scales, mins
        )

    def pack(self, fields: BlockFields) -> "U8":
        """Join fields into stored blocks [blocks, 144 or 176 bytes]."""
        import numpy as np

        assert fields.scales is not None and fields.mins is not None
        (first_scales, last_scales), (first_mins, last_mins) = (
            np.split(part, 2, 1) for part in (fields.scales, fields.mins)
        )
        packed = [
            first_scales | (last_scales >> 4) << 6,
            first_mins | (last_mins >> 4) << 6,
            (last_scales & 15) | (last_mins & 15) << 4,
        ]
        parts = [
            pack_f16(fields.d),
            pack_f16(fields.m),
            *(part.astype(np.uint8) for part in packed),
        ]
        if self.has_fifth_bit:
            parts.append(pack_planes((fields.codes >> 4).reshape(-1, 8, 32), 1))
        return concat_bytes(*parts, pack_planes((fields.codes & 15).reshape(-1, 4, 2, 32), 4))


class Q6K(LinearFormat):
    """Q6_K, 256 values in 210 bytes: the low nibbles of the codes, their top two bits, sixteen
    signed scales of eight bits, then d.
    """

    name, high, zero = "Q6_K", 63, 32

    def unpack(self, blocks: "U8") -> BlockFields:
        """Split stored blocks [blocks, 210 bytes] into their fields. Scales are -128 to 127."""
        import numpy as np

        low_nibbles = unpack_planes(blocks[:, :128].reshape(-1, 2, 64), 4).reshape(-1, 256)
        scales = np.ascontiguousarray(blocks[:, 192:208]).view(np.int8).astype(np.int16)
        return BlockFields(
            low_nibbles | unpack_two_bits(blocks[:, 128:192]) << 4,
            unpack_f16(blocks[:, 208:]),
            scales=scales,
        )

    def pack(self, fields: BlockFields) -> "U8":
        """Join fields into stored blocks [blocks, 210 bytes]."""
        import numpy as np

        assert fields.scales is not None
        low_nibbles, top_bits = (
            pack_planes((fields.codes & 15).reshape(-1, 2, 2, 64), 4),
            pack_two_bits(fields.codes >> 4),
        )
        return concat_bytes(
            low_nibbles, top_bits, fields.scales.astype(np.int8).view(np.uint8), pack_f16(fields.d)
        )


FORMATS = (Q2K(), Q3K(), Q45K("Q4_K", has_fifth_bit=False), Q45K("Q5_K", has_fifth_bit=True), Q6K())
