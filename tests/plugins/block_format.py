"""Q8_0: d, then 32 signed bytes."""

from typing import TYPE_CHECKING

from quant.formats.base import Fields, Linear
from quant.formats.bit_packing import halves, joined, stored_halves

if TYPE_CHECKING:
    from quant.native.ggml import U8


class SignedBytes(Linear):
    """Evenly spaced codes from -128 to 127."""

    name, low, high = "Q8_0", -128, 127

    def unpack(self, blocks: "U8") -> Fields:
        """Split blocks [blocks, 34] into fields."""
        import numpy as np

        return Fields(blocks[:, 2:].view(np.int8).astype(np.int16), halves(blocks[:, :2]))

    def pack(self, fields: Fields) -> "U8":
        """Join fields into blocks [blocks, 34]."""
        import numpy as np

        return joined(stored_halves(fields.d), fields.codes.astype(np.int8).view(np.uint8))


FORMATS = (SignedBytes(),)
