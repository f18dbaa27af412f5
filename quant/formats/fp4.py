"""The formats whose codes are four-bit floats (E2M1), which some models are trained in: MXFP4 and
NVFP4.

Layouts of ggml/src/ggml-common.h, scales as in ggml/src/ggml-impl.h. It knows bytes of blocks,
nothing of how scales are found.
"""

from typing import TYPE_CHECKING

from quant.formats.base import Fields, Scalar, halfway, looked_up, whole
from quant.formats.bits import joined, merged, planes

if TYPE_CHECKING:
    from quant.formats.base import Ints
    from quant.native import F32, U8

SIZES = (0, 1, 2, 3, 4, 6, 8, 12)  # in halves, so that they are whole; scales are halved for it
LEVELS = (*SIZES, *(-size for size in SIZES))


class E2M1(Scalar):
    """Codes are a sign bit above three bits for a size."""

    def levels(self, codes: "Ints") -> "F32":
        """Halves of an E2M1 number; code 8 is a zero as well."""
        return looked_up(LEVELS, codes)

    def nearest(self, numbers: "F32") -> "Ints":
        """A number halfway between two goes to the smaller, as in ggml's best_index_mxfp4; zero is
        code 0.
        """
        size = sum((abs(numbers) > edge) * 1 for edge in halfway(SIZES))
        return whole(size + 8 * ((numbers < 0) & (size > 0)))


class MXFP4(E2M1):
    """A power of two and sixteen bytes of low and high nibbles."""

    name = "MXFP4"

    def unpack(self, blocks: "U8") -> Fields:
        """Take blocks [blocks, 17] apart; d is 2^-128 to 2^127."""
        import numpy as np

        d = np.ldexp(np.float32(1), blocks[:, 0].astype(np.int32) - 128)
        return Fields(planes(blocks[:, 1:], 4).reshape(-1, 32), d)

    def pack(self, fields: Fields) -> "U8":
        """Put blocks together."""
        import numpy as np

        exponents = np.frexp(fields.d)[1] + 127  # 2^n is 0.5 times 2^(n + 1)
        return joined(exponents[:, None], merged(fields.codes.reshape(-1, 2, 16), 4))


class NVFP4(E2M1):
    """Four scales, floats without sign of four bits of exponent and three of mantissa, and four
    times eight bytes.
    """

    name = "NVFP4"

    def unpack(self, blocks: "U8") -> Fields:
        """Take blocks [blocks, 36] apart; d [blocks, 4] is 0 to 224 (240 is none, and reads as 0)."""
        import numpy as np

        exponents, parts = (
            (blocks[:, :4] >> 3 & 15).astype(np.int32),
            (blocks[:, :4] & 7).astype(np.float32),
        )
        d = np.ldexp(np.where(exponents > 0, parts + 8, parts), np.maximum(exponents, 1) - 11)
        d[blocks[:, :4] == 127] = 0
        return Fields(planes(blocks[:, 4:].reshape(-1, 4, 8), 4).reshape(-1, 64), d)

    def pack(self, fields: Fields) -> "U8":
        """Put blocks together."""
        import numpy as np

        parts, exponents = np.frexp(fields.d)  # 0.5 to 1, and the power of two behind it
        normal = (exponents + 7 << 3) + (16 * parts - 8)
        scales = np.where(fields.d < 2**-7, fields.d * 1024, normal)
        return joined(scales, merged(fields.codes.reshape(-1, 4, 2, 8), 4))


FORMATS = (MXFP4(), NVFP4())
