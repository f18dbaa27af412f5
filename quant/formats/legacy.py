"""The formats with blocks of 32 and one scale: Q4_0, Q4_1, Q5_0, Q5_1, Q8_0.

Layouts of ggml/src/ggml-common.h. It knows bytes of blocks, nothing of how scales are found.
"""

from typing import TYPE_CHECKING

from quant.formats.base import Fields, Format, halves, joined, merged, planes, stored_halves

if TYPE_CHECKING:
    from quant.formats.base import I16
    from quant.native import F32, U8


class Blocks32(Format):
    """d, m in the _1 types, the fifth bits in the Q5 types, sixteen bytes of low and high nibbles."""

    def __init__(self, name: str, *, least: bool, fifth: bool) -> None:
        self.name, self.least, self.fifth = name, least, fifth

    def unpack(self, blocks: "U8") -> Fields:
        """Take blocks [blocks, 18 to 24] apart; the minimum of the _1 types is `m` itself."""
        codes = planes(blocks[:, -16:], 4).reshape(-1, 32)
        if self.fifth:
            # Bit j of the four bytes belongs to value j.
            codes = codes | planes(blocks[:, -20:-16, None], 1).reshape(-1, 32) << 4
        return Fields(codes, halves(blocks[:, :2]), halves(blocks[:, 2:4]) if self.least else None)

    def pack(self, fields: Fields) -> "U8":
        """Put blocks together."""
        parts = [stored_halves(fields.d)]
        if self.least:
            parts.append(stored_halves(fields.m))
        if self.fifth:
            parts.append(merged((fields.codes >> 4).reshape(-1, 4, 8, 1), 1))
        return joined(*parts, merged((fields.codes & 15).reshape(-1, 2, 16), 4))

    def levels(self, codes: "I16") -> "F32":
        """Without a minimum the middle code stands for zero."""
        import numpy as np

        return (codes if self.least else codes - (16 if self.fifth else 8)).astype(np.float32)


class Q8(Format):
    """d and 32 signed bytes."""

    name = "Q8_0"

    def unpack(self, blocks: "U8") -> Fields:
        """Take blocks [blocks, 34] apart; codes are signed."""
        import numpy as np

        return Fields(blocks[:, 2:].view(np.int8).astype(np.int16), halves(blocks[:, :2]))

    def pack(self, fields: Fields) -> "U8":
        """Put blocks together."""
        import numpy as np

        return joined(stored_halves(fields.d), fields.codes.astype(np.int8).view(np.uint8))


FORMATS = (
    Blocks32("Q4_0", least=False, fifth=False),
    Blocks32("Q4_1", least=True, fifth=False),
    Blocks32("Q5_0", least=False, fifth=True),
    Blocks32("Q5_1", least=True, fifth=True),
    Q8(),
)
