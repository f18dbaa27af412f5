"""The formats whose codes stand for vectors of four or eight values from a codebook: IQ1, IQ2 and
IQ3.

A code is an index into the codebook, with bits above the index that flip the signs of the vector or
shift it. These formats have no `nearest_codes`, because the values of a vector have to be chosen
together; fit() leaves the choice to ggml. The first call of ggml's encoder takes up to a minute to
build its tables.

Source: layouts of ggml/src/ggml-common.h and the dequantize_row functions of
ggml/src/ggml-quants.c; the codebooks are those of the gguf package.
"""

from functools import cache
from typing import TYPE_CHECKING

from quant.formats.base import BlockFields, BlockFormat, lookup
from quant.formats.bit_packing import (
    concat_bytes,
    join_words,
    pack_f16,
    pack_fields,
    pack_words,
    split_words,
    unpack_f16,
    unpack_fields,
    unpack_words,
)

if TYPE_CHECKING:
    from quant.formats.base import Ints
    from quant.native.ggml import F32, U8


@cache
def codebook(name: str) -> "F32":
    """Return the vectors [entries, 4 or 8] of a format's codebook, from the gguf package's
    tables.
    """
    from gguf import quants

    kind = getattr(quants, name)
    kind.init_grid()
    vectors: F32 = kind.grid[0, 0]
    return vectors


@cache
def sign_table(count: int) -> "F32":
    """Return signs 1 and -1 [2 ** count, count]: value j is negative where bit j is set."""
    import numpy as np

    return (1 - 2 * (np.arange(1 << count)[:, None] >> np.arange(count) & 1)).astype(np.float32)


class SignedCodebook(BlockFormat):
    """A format in which each value has its own sign: a code has `index_bits` bits of index, and bit
    j above them is set if value j is negative.

    Scales are odd integers, because ggml adds one half to the stored scale and they count halves;
    `unit` is half of ggml's other constant factor.
    """

    index_bits: int
    unit: float

    def levels(self, codes: "Ints") -> "F32":
        """Return the values of each code's vector, in steps of the scale."""
        vectors = lookup(codebook(self.name), codes & (1 << self.index_bits) - 1)
        signed: F32 = (
            vectors * lookup(sign_table(vectors.shape[-1]), codes >> self.index_bits) * self.unit
        )
        return signed


def _even(seven: "Ints") -> "Ints":
    """Append the eighth sign bit to seven stored ones: it makes the number of set signs even."""
    import numpy as np

    return seven | (np.bitwise_count(seven) & 1).astype(np.int32) << 7


def _odd(stored: "Ints") -> "Ints":
    """Return the scales that values are multiplied with, in halves: 1, 3, 5 … for the stored scales
    0, 1, 2 …
    """
    return 2 * stored + 1


def _stored_odd(fields: BlockFields) -> "Ints":
    import numpy as np

    assert fields.scales is not None
    return fields.scales.astype(np.int32) >> 1


class IQ2XXS(SignedCodebook):
    """IQ2_XXS: d, then for every 32 values four indices of eight bits, seven signs for each index,
    and a scale of four bits.
    """

    name, index_bits, unit = "IQ2_XXS", 8, 1 / 8

    def unpack(self, blocks: "U8") -> BlockFields:
        """Split blocks [blocks, 66] into fields."""
        pairs = unpack_words(blocks[:, 2:], 4).reshape(-1, 8, 2)
        codes = split_words(pairs[..., 0], 8, 4) | _even(split_words(pairs[..., 1], 7, 4)) << 8
        return BlockFields(
            codes.reshape(-1, 32), unpack_f16(blocks[:, :2]), scales=_odd(pairs[..., 1] >> 28 & 15)
        )

    def pack(self, fields: BlockFields) -> "U8":
        """Join fields into blocks [blocks, 66]."""
        import numpy as np

        codes = fields.codes.reshape(-1, 8, 4)
        turns = join_words(codes >> 8 & 127, 7) | _stored_odd(fields) << 28
        pairs = np.stack([join_words(codes & 255, 8), turns], axis=-1)
        return concat_bytes(pack_f16(fields.d), pack_words(pairs.reshape(-1, 16), 4))


class IQ2XS(SignedCodebook):
    """IQ2_XS: d, words of an index of nine bits and seven signs, and a scale of four bits for every
    16 values.
    """

    name, index_bits, unit = "IQ2_XS", 9, 1 / 8

    def unpack(self, blocks: "U8") -> BlockFields:
        """Split blocks [blocks, 74] into fields."""
        pairs = unpack_words(blocks[:, 2:66], 2)
        codes = pairs & 511 | _even(pairs >> 9) << 9
        return BlockFields(
            codes, unpack_f16(blocks[:, :2]), scales=_odd(unpack_fields(blocks[:, 66:], 4))
        )

    def pack(self, fields: BlockFields) -> "U8":
        """Join fields into blocks [blocks, 74]."""
        pairs = pack_words(fields.codes & 0xFFFF, 2)
        return concat_bytes(pack_f16(fields.d), pairs, pack_fields(_stored_odd(fields), 4))


class IQ2S(SignedCodebook):
    """IQ2_S: d, the low bytes of 32 indices, eight signs for each index, the top two bits of the
    indices, and scales as in IQ2_XS.
    """

    name, index_bits, unit = "IQ2_S", 10, 1 / 8

    def unpack(self, blocks: "U8") -> BlockFields:
        """Split blocks [blocks, 82] into fields."""
        low, turns = unpack_words(blocks[:, 2:34], 1), unpack_words(blocks[:, 34:66], 1)
        codes = low | unpack_fields(blocks[:, 66:74], 2) << 8 | turns << 10
        return BlockFields(
            codes, unpack_f16(blocks[:, :2]), scales=_odd(unpack_fields(blocks[:, 74:], 4))
        )

    def pack(self, fields: BlockFields) -> "U8":
        """Join fields into blocks [blocks, 82]."""
        low, top, turns = (
            fields.codes & 255,
            pack_fields(fields.codes >> 8 & 3, 2),
            fields.codes >> 10,
        )
        return concat_bytes(
            pack_f16(fields.d), low, turns, top, pack_fields(_stored_odd(fields), 4)
        )


class IQ3XXS(SignedCodebook):
    """IQ3_XXS: d, 64 indices of eight bits, and for every 32 values four times seven signs and a
    scale of four bits.
    """

    name, index_bits, unit = "IQ3_XXS", 8, 1 / 4

    def unpack(self, blocks: "U8") -> BlockFields:
        """Split blocks [blocks, 98] into fields. Two vectors of four values share eight signs."""
        pairs = unpack_words(blocks[:, 66:], 4)
        turns = split_words(_even(split_words(pairs, 7, 4)), 4, 2).reshape(-1, 64)
        codes = unpack_words(blocks[:, 2:66], 1) | turns << 8
        return BlockFields(codes, unpack_f16(blocks[:, :2]), scales=_odd(pairs >> 28 & 15))

    def pack(self, fields: BlockFields) -> "U8":
        """Join fields into blocks [blocks, 98]."""
        turns = join_words((fields.codes >> 8).reshape(-1, 8, 4, 2), 4)
        pairs = join_words(turns & 127, 7) | _stored_odd(fields) << 28
        return concat_bytes(pack_f16(fields.d), fields.codes & 255, pack_words(pairs, 4))


class IQ3S(SignedCodebook):
    """IQ3_S: d, the low bytes of 64 indices, their top bits, eight signs for every two vectors, and
    four bits of scale for every 32 values.
    """

    name, index_bits, unit = "IQ3_S", 9, 1

    def unpack(self, blocks: "U8") -> BlockFields:
        """Split blocks [blocks, 110] into fields."""
        codes = (
            unpack_words(blocks[:, 2:66], 1)
            | unpack_fields(blocks[:, 66:74], 1) << 8
            | unpack_fields(blocks[:, 74:106], 4) << 9
        )
        return BlockFields(
            codes, unpack_f16(blocks[:, :2]), scales=_odd(unpack_fields(blocks[:, 106:], 4))
        )

    def pack(self, fields: BlockFields) -> "U8":
        """Join fields into blocks [blocks, 110]."""
        top, turns = pack_fields(fields.codes >> 8 & 1, 1), pack_fields(fields.codes >> 9, 4)
        scales = pack_fields(_stored_odd(fields), 4)
        return concat_bytes(pack_f16(fields.d), fields.codes & 255, top, turns, scales)


class ShiftedCodebook(BlockFormat):
    """A format with vectors of -1, 0 and 1 that are shifted by one eighth. The bit above the eleven
    bits of the index says whether the eighth is subtracted or added.
    """

    def levels(self, codes: "Ints") -> "F32":
        """Return the values of each code's vector, in steps of the scale."""
        vectors: F32 = (
            lookup(codebook(self.name), codes & 2047)
            + lookup((1 / 8, -1 / 8), codes >> 11)[..., None]
        )
        return vectors


class IQ1S(ShiftedCodebook):
    """IQ1_S: d, the low bytes of 32 indices, and for every four indices a word with their top three
    bits, a scale of three bits and the shift.
    """

    name = "IQ1_S"

    def unpack(self, blocks: "U8") -> BlockFields:
        """Split blocks [blocks, 50] into fields."""
        above = unpack_words(blocks[:, 34:], 2)  # [blocks, 8]
        top_bits = (split_words(above, 3, 4) | (above >> 15 << 3)[..., None]).reshape(-1, 32)
        return BlockFields(
            unpack_words(blocks[:, 2:34], 1) | top_bits << 8,
            unpack_f16(blocks[:, :2]),
            scales=_odd(above >> 12 & 7),
        )

    def pack(self, fields: BlockFields) -> "U8":
        """Join fields into blocks [blocks, 50]; the four codes of a group share their shift."""
        top = (fields.codes >> 8).reshape(-1, 8, 4)
        shift = top[..., 0] >> 3
        assert (top >> 3 == shift[..., None]).all()
        above = join_words(top & 7, 3) | _stored_odd(fields) << 12 | shift << 15
        return concat_bytes(pack_f16(fields.d), fields.codes & 255, pack_words(above, 2))


class IQ1M(ShiftedCodebook):
    """IQ1_M: the low bytes of 32 indices, a nibble for each index with its top bits and shift, then
    four words, each with four scales and a nibble of d.
    """

    name = "IQ1_M"

    def unpack(self, blocks: "U8") -> BlockFields:
        """Split blocks [blocks, 56] into fields; each scale covers 16 values."""
        codes = unpack_words(blocks[:, :32], 1) | unpack_fields(blocks[:, 32:48], 4) << 8
        pairs = unpack_words(blocks[:, 48:], 2)  # [blocks, 4]
        d = pack_words(join_words(pairs >> 12, 4)[:, None], 2)
        return BlockFields(
            codes, unpack_f16(d), scales=_odd(split_words(pairs, 3, 4).reshape(-1, 16))
        )

    def pack(self, fields: BlockFields) -> "U8":
        """Join fields into blocks [blocks, 56]."""
        scales = join_words(_stored_odd(fields).reshape(-1, 4, 4), 3)
        pairs = scales | split_words(unpack_words(pack_f16(fields.d), 2)[:, 0], 4, 4) << 12
        return concat_bytes(
            fields.codes & 255, pack_fields(fields.codes >> 8, 4), pack_words(pairs, 2)
        )


FORMATS = (IQ2XXS(), IQ2XS(), IQ2S(), IQ3XXS(), IQ3S(), IQ1S(), IQ1M())
