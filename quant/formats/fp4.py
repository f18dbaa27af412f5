"""The formats whose codes are four-bit floats (E2M1): MXFP4 and NVFP4. Some models are trained in
these formats.

Source: layouts of ggml/src/ggml-common.h, scales as in ggml/src/ggml-impl.h.
"""

from typing import TYPE_CHECKING

from quant.formats.base import BlockFields, ScalarFormat, lookup, midpoints, to_i16
from quant.formats.bit_packing import concat_bytes, pack_planes, unpack_planes

if TYPE_CHECKING:
    from quant.formats.base import Ints
    from quant.native.ggml import F32, U8

# Twice the E2M1 numbers, so that they are integers. The scales are halved to match.
E2M1_MAGNITUDES = (0, 1, 2, 3, 4, 6, 8, 12)
E2M1_LEVELS = (*E2M1_MAGNITUDES, *(-size for size in E2M1_MAGNITUDES))


class E2M1Format(ScalarFormat):
    """A format whose codes are four-bit floats: a sign bit above three bits of magnitude."""

    def levels(self, codes: "Ints") -> "F32":
        """Return twice the E2M1 number of each code, which is an integer; unpack() halves the
        scales to match. Code 8 (minus zero) gives zero.
        """
        return lookup(E2M1_LEVELS, codes)

    def round_steps(self, numbers: "F32") -> "Ints":
        """Return the nearest code of each number. A number halfway between two levels goes to the
        smaller one, as in ggml's best_index_mxfp4. Zero gets code 0.
        """
        size = sum((abs(numbers) > edge) * 1 for edge in midpoints(E2M1_MAGNITUDES))
        return to_i16(size + 8 * ((numbers < 0) & (size > 0)))


class MXFP4(E2M1Format):
    """MXFP4, 32 values in 17 bytes: the exponent of the scale, then sixteen bytes with the codes as
    low and high nibbles.
    """

    name = "MXFP4"

    def unpack(self, blocks: "U8") -> BlockFields:
        """Split stored blocks [blocks, 17 bytes] into their fields. d is a power of two, 2^-128 to
        2^127.
        """
        import numpy as np

        d = np.ldexp(np.float32(1), blocks[:, 0].astype(np.int32) - 128)
        return BlockFields(unpack_planes(blocks[:, 1:], 4).reshape(-1, 32), d)

    def pack(self, fields: BlockFields) -> "U8":
        """Join fields into stored blocks [blocks, 17 bytes]."""
        import numpy as np

        exponents = np.frexp(fields.d)[1] + 127  # 2^n is 0.5 times 2^(n + 1)
        return concat_bytes(exponents[:, None], pack_planes(fields.codes.reshape(-1, 2, 16), 4))


class NVFP4(E2M1Format):
    """NVFP4, 64 values in 36 bytes: the scales of four groups, which are unsigned floats with four
    bits of exponent and three of mantissa, then eight bytes of codes for each group.
    """

    name = "NVFP4"

    def unpack(self, blocks: "U8") -> BlockFields:
        """Split stored blocks [blocks, 36 bytes] into their fields. d [blocks, 4] is 0 to 224; the
        byte 127, which is NaN in this float format, reads as 0.
        """
        import numpy as np

        exponents = (blocks[:, :4] >> 3 & 15).astype(np.int32)
        mantissas = (blocks[:, :4] & 7).astype(np.float32)
        magnitudes = np.where(exponents > 0, mantissas + 8, mantissas)
        d = np.ldexp(magnitudes, np.maximum(exponents, 1) - 11)
        d[blocks[:, :4] == 127] = 0
        return BlockFields(unpack_planes(blocks[:, 4:].reshape(-1, 4, 8), 4).reshape(-1, 64), d)

    def pack(self, fields: BlockFields) -> "U8":
        """Join fields into stored blocks [blocks, 36 bytes]."""
        import numpy as np

        mantissas, exponents = np.frexp(fields.d)  # a mantissa from 0.5 to 1, and a power of two
        normal = (exponents + 7 << 3) + (16 * mantissas - 8)
        scales = np.where(fields.d < 2**-7, fields.d * 1024, normal)
        return concat_bytes(scales, pack_planes(fields.codes.reshape(-1, 4, 2, 8), 4))


FORMATS = (MXFP4(), NVFP4())
