"""Packs and unpacks the bit fields of blocks. unpack functions split bytes into integers, and pack
functions join integers into bytes.

Three layouts occur. In planes, the lowest bits of all bytes come first. In fields, all bits of the
first byte come first. Words are little-endian integers of one, two or four bytes.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quant.formats.base import Floats, Ints
    from quant.native.ggml import U8


def unpack_planes(stored: "U8", bits: int) -> "Ints":
    """Unpack fields of `bits` bits, [..., bytes] -> [..., 8 / bits, bytes]: first the lowest field
    of every byte, then the next field of every byte, and so on.
    """
    import numpy as np

    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    return ((stored[..., None, :] >> shifts) & np.uint8((1 << bits) - 1)).astype(np.int16)


def pack_planes(codes: "Ints", bits: int) -> "U8":
    """Pack fields of `bits` bits, [..., 8 / bits, bytes] -> [..., bytes], the inverse of
    unpack_planes().
    """
    import numpy as np

    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    stored: U8 = np.bitwise_or.reduce(codes.astype(np.uint8) << shifts, axis=-2)
    return stored


def unpack_fields(stored: "U8", bits: int) -> "Ints":
    """Unpack fields of `bits` bits, [blocks, bytes] -> [blocks, fields]: first all fields of the
    first byte, starting with its lowest bits, then those of the next byte.
    """
    return unpack_planes(stored[..., None], bits).reshape(len(stored), -1)


def pack_fields(codes: "Ints", bits: int) -> "U8":
    """Pack fields of `bits` bits, [blocks, fields] -> [blocks, bytes], the inverse of
    unpack_fields().
    """
    return pack_planes(codes.reshape(len(codes), -1, 8 // bits, 1), bits)[..., 0]


def unpack_two_bits(stored: "U8") -> "Ints":
    """Unpack two-bit fields, [blocks, 64 bytes] -> [blocks, 256]. In each half of 128 values, byte
    l contains the values l, l + 32, l + 64 and l + 96.
    """
    return unpack_planes(stored.reshape(len(stored), -1, 32), 2).reshape(len(stored), -1)


def pack_two_bits(codes: "Ints") -> "U8":
    """Pack two-bit fields, [blocks, 256] -> [blocks, 2, 32], the inverse of unpack_two_bits()."""
    return pack_planes(codes.reshape(len(codes), -1, 4, 32), 2)


def unpack_words(stored: "U8", size: int) -> "Ints":
    """Unpack little-endian words of `size` bytes, [blocks, bytes] -> [blocks, words] as int32.
    Words of four bytes become signed.
    """
    import numpy as np

    return np.ascontiguousarray(stored).view(f"<u{size}").astype(np.uint32).view(np.int32)


def pack_words(values: "Ints", size: int) -> "U8":
    """Pack int32 words into `size` bytes each, [blocks, words] -> [blocks, bytes], the inverse of
    unpack_words().
    """
    import numpy as np

    return (
        np.ascontiguousarray(values)
        .view(np.uint32)
        .astype(f"<u{size}")
        .view(np.uint8)
        .reshape(len(values), -1)
    )


def split_words(values: "Ints", bits: int, count: int) -> "Ints":
    """Split words [...] into their `count` lowest fields of `bits` bits, [..., count], starting
    with the lowest bits.
    """
    import numpy as np

    return (values[..., None] >> np.arange(0, bits * count, bits, dtype=np.int32)) & np.int32(
        (1 << bits) - 1
    )


def join_words(codes: "Ints", bits: int) -> "Ints":
    """Join fields of `bits` bits, [..., count], into words [...], the inverse of split_words()."""
    import numpy as np

    shifts = np.arange(0, bits * codes.shape[-1], bits, dtype=np.int32)
    values: Ints = np.bitwise_or.reduce(codes.astype(np.int32) << shifts, axis=-1)
    return values


def unpack_f16(stored: "U8") -> "Floats":
    """Unpack F16 numbers: bytes [blocks, 2] -> floats [blocks]."""
    import numpy as np

    return np.ascontiguousarray(stored).view(np.float16)[:, 0]


def pack_f16(values: "Floats | None") -> "U8":
    """Pack numbers as F16: floats [blocks] -> bytes [blocks, 2]. `values` must not be None."""
    import numpy as np

    assert values is not None
    return np.ascontiguousarray(values, np.float16).view(np.uint8).reshape(-1, 2)


def concat_bytes(*fields: "U8 | Ints") -> "U8":
    """Convert arrays [blocks, ...] of byte-sized integers to bytes, and concatenate them to one row
    of bytes for each block [blocks, bytes].
    """
    import numpy as np

    return np.concatenate(
        [field.astype(np.uint8).reshape(len(field), -1) for field in fields], axis=1
    )
