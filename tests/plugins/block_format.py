"""Q8_0: a block is the scale d in F16, followed by 32 signed bytes."""

from typing import TYPE_CHECKING

from quant.formats.base import BlockFields, LinearFormat
from quant.formats.bit_packing import concat_bytes, pack_f16, unpack_f16

if TYPE_CHECKING:
    from quant.native.ggml import U8


class SignedBytes(LinearFormat):
    """A format with evenly spaced codes from -128 to 127."""

    name, low, high = "Q8_0", -128, 127

    def unpack(self, blocks: "U8") -> BlockFields:
        """Split the bytes of blocks [blocks, 34] into codes and scales."""
        import numpy as np

        return BlockFields(blocks[:, 2:].view(np.int8).astype(np.int16), unpack_f16(blocks[:, :2]))

    def pack(self, fields: BlockFields) -> "U8":
        """Join codes and scales into the bytes of blocks [blocks, 34]."""
        import numpy as np

        return concat_bytes(pack_f16(fields.d), fields.codes.astype(np.int8).view(np.uint8))


FORMATS = (SignedBytes(),)
