"""Fields of a few bits in the bytes of blocks, taken apart and put together.

It knows bytes and their order, nothing of what the fields mean.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quant.formats.base import Floats, Ints
    from quant.native import U8


def planes(stored: "U8", bits: int) -> "Ints":
    """Fields of `bits` bits [..., bytes] -> [..., 8 / bits, bytes]: the lowest bits of all bytes
    come first.
    """
    import numpy as np

    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    return ((stored[..., None, :] >> shifts) & np.uint8((1 << bits) - 1)).astype(np.int16)


def merged(codes: "Ints", bits: int) -> "U8":
    """The reverse of planes(): [..., 8 / bits, bytes] -> [..., bytes]."""
    import numpy as np

    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    stored: U8 = np.bitwise_or.reduce(codes.astype(np.uint8) << shifts, axis=-2)
    return stored


def in_turn(stored: "U8", bits: int) -> "Ints":
    """Fields of `bits` bits [blocks, bytes] -> [blocks, fields]: those of the first byte come
    first.
    """
    return planes(stored[..., None], bits).reshape(len(stored), -1)


def stored_in_turn(codes: "Ints", bits: int) -> "U8":
    """The reverse of in_turn()."""
    return merged(codes.reshape(len(codes), -1, 8 // bits, 1), bits)[..., 0]


def twos(stored: "U8") -> "Ints":
    """Two-bit fields [blocks, 64]: byte l of each 32 holds values l, l + 32, l + 64 and l + 96."""
    return planes(stored.reshape(len(stored), -1, 32), 2).reshape(len(stored), -1)


def stored_twos(codes: "Ints") -> "U8":
    """The reverse of twos(): [blocks, 2, 32]."""
    return merged(codes.reshape(len(codes), -1, 4, 32), 2)


def words(stored: "U8", size: int) -> "Ints":
    """Little-endian words of `size` bytes [blocks, bytes] -> [blocks, words]; of four bytes the top
    bit is a sign.
    """
    import numpy as np

    return np.ascontiguousarray(stored).view(f"<u{size}").astype(np.uint32).view(np.int32)


def stored_words(values: "Ints", size: int) -> "U8":
    """The reverse of words()."""
    import numpy as np

    return (
        np.ascontiguousarray(values)
        .view(np.uint32)
        .astype(f"<u{size}")
        .view(np.uint8)
        .reshape(len(values), -1)
    )


def split(values: "Ints", bits: int, count: int) -> "Ints":
    """The `count` lowest fields of `bits` bits in words [...] -> [..., count]."""
    import numpy as np

    return (values[..., None] >> np.arange(0, bits * count, bits, dtype=np.int32)) & np.int32(
        (1 << bits) - 1
    )


def stored_split(codes: "Ints", bits: int) -> "Ints":
    """The reverse of split(): [..., count] -> words [...]."""
    import numpy as np

    shifts = np.arange(0, bits * codes.shape[-1], bits, dtype=np.int32)
    values: Ints = np.bitwise_or.reduce(codes.astype(np.int32) << shifts, axis=-1)
    return values


def halves(stored: "U8") -> "Floats":
    """Two bytes [blocks, 2] -> one float [blocks]."""
    import numpy as np

    return np.ascontiguousarray(stored).view(np.float16)[:, 0]


def stored_halves(values: "Floats | None") -> "U8":
    """Floats [blocks] -> bytes [blocks, 2]."""
    import numpy as np

    assert values is not None
    return np.ascontiguousarray(values, np.float16).view(np.uint8).reshape(-1, 2)


def joined(*parts: "U8 | Ints") -> "U8":
    """Fields [blocks, …] one behind the other, as bytes [blocks, bytes]."""
    import numpy as np

    return np.concatenate([part.astype(np.uint8).reshape(len(part), -1) for part in parts], axis=1)
