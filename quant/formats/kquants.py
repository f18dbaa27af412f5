"""The k-quants, superblocks of 256 with scales for groups of 16 or 32: Q2_K, Q3_K, Q4_K, Q5_K,
Q6_K.

Layouts of ggml/src/ggml-common.h and the dequantize_row functions of ggml/src/ggml-quants.c. It
knows bytes of blocks, nothing of how scales are found.
"""

from typing import TYPE_CHECKING

from quant.formats.base import Fields, Linear
from quant.formats.bits import halves, joined, merged, planes, stored_halves, stored_twos, twos

if TYPE_CHECKING:
    from quant.formats.base import Ints
    from quant.native import U8


def _tops(stored: "U8") -> "Ints":
    """One-bit fields: bit j // 32 of byte j % 32 belongs to value j."""
    return planes(stored, 1).reshape(-1, 256)


class Q2K(Linear):
    """Sixteen bytes of scales (low nibble) and minimums (high), two-bit codes, d, the scale of the
    minimums.
    """

    name, high = "Q2_K", 3

    def unpack(self, blocks: "U8") -> Fields:
        """Take blocks [blocks, 84] apart; scales and mins are 0 to 15."""
        pairs = planes(blocks[:, :16], 4)
        d, m = halves(blocks[:, 80:82]), halves(blocks[:, 82:84])
        return Fields(twos(blocks[:, 16:80]), d, m, pairs[:, 0], pairs[:, 1])

    def pack(self, fields: Fields) -> "U8":
        """Put blocks together."""
        import numpy as np

        assert fields.scales is not None and fields.mins is not None
        pairs = merged(np.stack([fields.scales, fields.mins], 1), 4)
        return joined(
            pairs, stored_twos(fields.codes), stored_halves(fields.d), stored_halves(fields.m)
        )


class Q3K(Linear):
    """The third bits of the codes, the others, sixteen scales of six bits, d."""

    name, high, zero = "Q3_K", 7, 4

    def unpack(self, blocks: "U8") -> Fields:
        """Take blocks [blocks, 110] apart; scales are -32 to 31."""
        codes = twos(blocks[:, 32:96]) | _tops(blocks[:, :32]) << 2
        low = planes(blocks[:, 96:104], 4).reshape(-1, 16)
        top = planes(blocks[:, 104:108], 2).reshape(-1, 16)
        return Fields(codes, halves(blocks[:, 108:]), scales=(low | top << 4) - 32)

    def pack(self, fields: Fields) -> "U8":
        """Put blocks together."""
        assert fields.scales is not None
        scales = fields.scales + 32
        tops, low_bits = (
            merged((fields.codes >> 2).reshape(-1, 8, 32), 1),
            stored_twos(fields.codes & 3),
        )
        low, top = (
            merged((scales & 15).reshape(-1, 2, 8), 4),
            merged((scales >> 4).reshape(-1, 4, 4), 2),
        )
        return joined(tops, low_bits, low, top, stored_halves(fields.d))


class Q45K(Linear):
    """d, the scale of the minimums, eight scales and minimums of six bits; in Q5_K the fifth bits;
    nibbles.
    """

    def __init__(self, name: str, *, fifth: bool) -> None:
        self.name, self.fifth, self.high = name, fifth, 31 if fifth else 15

    def unpack(self, blocks: "U8") -> Fields:
        """Take blocks [blocks, 144 or 176] apart; scales and mins are 0 to 63."""
        import numpy as np

        codes = planes(blocks[:, -128:].reshape(-1, 4, 32), 4).reshape(-1, 256)
        if self.fifth:
            codes = codes | _tops(blocks[:, 16:48]) << 4
        # Four scales, four minimums, then the nibbles of four more; the tops of these are in the
        # first eight bytes.
        first, least, more = (blocks[:, at : at + 4].astype(np.int16) for at in (4, 8, 12))
        scales = np.concatenate([first & 63, (more & 15) | (first >> 6) << 4], 1)
        mins = np.concatenate([least & 63, (more >> 4) | (least >> 6) << 4], 1)
        return Fields(codes, halves(blocks[:, :2]), halves(blocks[:, 2:4]), scales, mins)

    def pack(self, fields: Fields) -> "U8":
        """Put blocks together."""
        import numpy as np

        assert fields.scales is not None and fields.mins is not None
        (first, more), (least, rest) = (
            np.split(part, 2, 1) for part in (fields.scales, fields.mins)
        )
        packed = [
            first | (more >> 4) << 6,
            least | (rest >> 4) << 6,
            (more & 15) | (rest & 15) << 4,
        ]
        parts = [
            stored_halves(fields.d),
            stored_halves(fields.m),
            *(part.astype(np.uint8) for part in packed),
        ]
        if self.fifth:
            parts.append(merged((fields.codes >> 4).reshape(-1, 8, 32), 1))
        return joined(*parts, merged((fields.codes & 15).reshape(-1, 4, 2, 32), 4))


class Q6K(Linear):
    """Low nibbles, two-bit tops, sixteen signed scales, d."""

    name, high, zero = "Q6_K", 63, 32

    def unpack(self, blocks: "U8") -> Fields:
        """Take blocks [blocks, 210] apart; scales are signed bytes."""
        import numpy as np

        low = planes(blocks[:, :128].reshape(-1, 2, 64), 4).reshape(-1, 256)
        scales = np.ascontiguousarray(blocks[:, 192:208]).view(np.int8).astype(np.int16)
        return Fields(low | twos(blocks[:, 128:192]) << 4, halves(blocks[:, 208:]), scales=scales)

    def pack(self, fields: Fields) -> "U8":
        """Put blocks together."""
        import numpy as np

        assert fields.scales is not None
        low, tops = (
            merged((fields.codes & 15).reshape(-1, 2, 2, 64), 4),
            stored_twos(fields.codes >> 4),
        )
        return joined(
            low, tops, fields.scales.astype(np.int8).view(np.uint8), stored_halves(fields.d)
        )


FORMATS = (Q2K(), Q3K(), Q45K("Q4_K", fifth=False), Q45K("Q5_K", fifth=True), Q6K())
