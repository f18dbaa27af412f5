"""The k-quants, superblocks of 256 with scales for groups of 16 or 32: Q2_K, Q3_K, Q4_K, Q5_K, Q6_K.

Layouts of ggml/src/ggml-common.h and the dequantize_row functions of ggml/src/ggml-quants.c. It knows bytes of
blocks, nothing of how scales are found.
"""

from typing import TYPE_CHECKING

from quant.formats.base import Fields, Format, halves, joined, merged, planes, stored_halves

if TYPE_CHECKING:
    from quant.formats.base import I16
    from quant.native import F32, U8


def _twos(stored: "U8") -> "I16":
    """Two-bit fields: byte l of each 32 holds values l, l + 32, l + 64 and l + 96."""
    return planes(stored.reshape(len(stored), -1, 32), 2).reshape(-1, 256)


def _stored_twos(codes: "I16") -> "U8":
    return merged(codes.reshape(-1, 2, 4, 32), 2)


def _tops(stored: "U8") -> "I16":
    """One-bit fields: bit j // 32 of byte j % 32 belongs to value j."""
    return planes(stored, 1).reshape(-1, 256)


class Q2K(Format):
    """Sixteen bytes of scales (low nibble) and minimums (high), two-bit codes, d, the scale of the minimums."""

    name = "Q2_K"

    def unpack(self, blocks: "U8") -> Fields:
        """Take blocks [blocks, 84] apart; scales and mins are 0 to 15."""
        pairs = planes(blocks[:, :16], 4)
        d, m = halves(blocks[:, 80:82]), halves(blocks[:, 82:84])
        return Fields(_twos(blocks[:, 16:80]), d, m, pairs[:, 0], pairs[:, 1])

    def pack(self, fields: Fields) -> "U8":
        """Put blocks together."""
        import numpy as np

        assert fields.scales is not None and fields.mins is not None
        pairs = merged(np.stack([fields.scales, fields.mins], 1), 4)
        return joined(pairs, _stored_twos(fields.codes), stored_halves(fields.d), stored_halves(fields.m))


class Q3K(Format):
    """The third bits of the codes, the others, sixteen scales of six bits, d."""

    name = "Q3_K"

    def unpack(self, blocks: "U8") -> Fields:
        """Take blocks [blocks, 110] apart; scales are -32 to 31, code 4 is zero."""
        codes = _twos(blocks[:, 32:96]) | _tops(blocks[:, :32]) << 2
        low = planes(blocks[:, 96:104], 4).reshape(-1, 16)
        top = planes(blocks[:, 104:108], 2).reshape(-1, 16)
        return Fields(codes, halves(blocks[:, 108:]), scales=(low | top << 4) - 32)

    def pack(self, fields: Fields) -> "U8":
        """Put blocks together."""
        assert fields.scales is not None
        scales = fields.scales + 32
        tops, twos = merged((fields.codes >> 2).reshape(-1, 8, 32), 1), _stored_twos(fields.codes & 3)
        low, top = merged((scales & 15).reshape(-1, 2, 8), 4), merged((scales >> 4).reshape(-1, 4, 4), 2)
        return joined(tops, twos, low, top, stored_halves(fields.d))

    def levels(self, codes: "I16") -> "F32":
        """Code 4 is zero."""
        import numpy as np

        return (codes - 4).astype(np.float32)


class Q45K(Format):
    """d, the scale of the minimums, eight scales and minimums of six bits; in Q5_K the fifth bits; nibbles."""

    def __init__(self, name: str, *, fifth: bool) -> None:
        self.name, self.fifth = name, fifth

    def unpack(self, blocks: "U8") -> Fields:
        """Take blocks [blocks, 144 or 176] apart; scales and mins are 0 to 63."""
        import numpy as np

        codes = planes(blocks[:, -128:].reshape(-1, 4, 32), 4).reshape(-1, 256)
        if self.fifth:
            codes = codes | _tops(blocks[:, 16:48]) << 4
        # Four scales, four minimums, then the nibbles of four more; the tops of these are in the first eight bytes.
        first, least, more = (blocks[:, at : at + 4].astype(np.int16) for at in (4, 8, 12))
        scales = np.concatenate([first & 63, (more & 15) | (first >> 6) << 4], 1)
        mins = np.concatenate([least & 63, (more >> 4) | (least >> 6) << 4], 1)
        return Fields(codes, halves(blocks[:, :2]), halves(blocks[:, 2:4]), scales, mins)

    def pack(self, fields: Fields) -> "U8":
        """Put blocks together."""
        import numpy as np

        assert fields.scales is not None and fields.mins is not None
        (first, more), (least, rest) = (np.split(part, 2, 1) for part in (fields.scales, fields.mins))
        packed = [first | (more >> 4) << 6, least | (rest >> 4) << 6, (more & 15) | (rest & 15) << 4]
        parts = [stored_halves(fields.d), stored_halves(fields.m), *(part.astype(np.uint8) for part in packed)]
        if self.fifth:
            parts.append(merged((fields.codes >> 4).reshape(-1, 8, 32), 1))
        return joined(*parts, merged((fields.codes & 15).reshape(-1, 4, 2, 32), 4))


class Q6K(Format):
    """Low nibbles, two-bit tops, sixteen signed scales, d."""

    name = "Q6_K"

    def unpack(self, blocks: "U8") -> Fields:
        """Take blocks [blocks, 210] apart; scales are signed bytes, code 32 is zero."""
        import numpy as np

        low = planes(blocks[:, :128].reshape(-1, 2, 64), 4).reshape(-1, 256)
        scales = np.ascontiguousarray(blocks[:, 192:208]).view(np.int8).astype(np.int16)
        return Fields(low | _twos(blocks[:, 128:192]) << 4, halves(blocks[:, 208:]), scales=scales)

    def pack(self, fields: Fields) -> "U8":
        """Put blocks together."""
        import numpy as np

        assert fields.scales is not None
        low, tops = merged((fields.codes & 15).reshape(-1, 2, 2, 64), 4), _stored_twos(fields.codes >> 4)
        return joined(low, tops, fields.scales.astype(np.int8).view(np.uint8), stored_halves(fields.d))

    def levels(self, codes: "I16") -> "F32":
        """Code 32 is zero."""
        import numpy as np

        return (codes - 32).astype(np.float32)


FORMATS = (Q2K(), Q3K(), Q45K("Q4_K", fifth=False), Q45K("Q5_K", fifth=True), Q6K())
