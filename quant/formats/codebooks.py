"""The formats IQ1, IQ2 and IQ3, whose codes stand for vectors of four or eight values from a
codebook.

A code is an index into the codebook. Bits above the index flip the signs of the vector's values or
shift them. These formats have no `nearest_codes`, because the values of a vector have to be chosen
together; fit() leaves the choice to ggml. The first call of ggml's encoder takes up to a minute to
build its tables.

Source: layouts of ggml/src/ggml-common.h and the dequantize_row functions of
ggml/src/ggml-quants.c. The codebooks are those of the gguf package.
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
    """Return the codebook of a format, its vectors [entries, 4 or 8], from the gguf package's
    tables.
    """
    from gguf import quants

    codec = getattr(quants, name)
    codec.init_grid()
    vectors: F32 = codec.grid[0, 0]
    return vectors


@cache
def sign_table(count: int) -> "F32":
    """Return the signs of `count` values for every combination of sign bits, [2 ** count, count]
    with entries 1 and -1. Value j is negative if bit j of the index is set.
    """
    import numpy as np

    return (1 - 2 * (np.arange(1 << count)[:, None] >> np.arange(count) & 1)).astype(np.float32)


class SignedCodebook(BlockFormat):
    """A format in which each value has its own sign. A code has `index_bits` bits of index; bit j
    above them is set if value j of the vector is negative.

    ggml multiplies vectors by d * (stored scale + 1/2) * constant. So that scales are integers, the
    fields have twice that scale, an odd number, and `factor` is half of ggml's constant.
    """

    index_bits: int
    factor: float

    def levels(self, codes: "Ints") -> "F32":
        """Return the level of each code: the vector from the codebook with its signs, times
        `factor`.
        """
        vectors = lookup(codebook(self.name), codes & (1 << self.index_bits) - 1)
        signed: F32 = (
            vectors * lookup(sign_table(vectors.shape[-1]), codes >> self.index_bits) * self.factor
        )
        return signed


def _with_eighth_sign(seven_bits: "Ints") -> "Ints":
    """Append the eighth sign bit to seven stored ones. ggml does not store it: it makes the number
    of set sign bits even.
    """
    import numpy as np

    return seven_bits | (np.bitwise_count(seven_bits) & 1).astype(np.int32) << 7


def _odd_scales(stored: "Ints") -> "Ints":
    """Return twice (stored scale + 1/2), the odd number by which values are multiplied: 1, 3, 5 ...
    for the stored scales 0, 1, 2 ...
    """
    return 2 * stored + 1


def _stored_scales(fields: BlockFields) -> "Ints":
    """Return the stored scales of fields, the inverse of _odd_scales()."""
    import numpy as np

    assert fields.scales is not None
    return fields.scales.astype(np.int32) >> 1


class IQ2XXS(SignedCodebook):
    """IQ2_XXS, 256 values in 66 bytes: d, then for every 32 values four indices of eight bits,
    seven sign bits for each index, and a scale of four bits.
    """

    name, index_bits, factor = "IQ2_XXS", 8, 1 / 8

    def unpack(self, blocks: "U8") -> BlockFields:
        """Split stored blocks [blocks, 66 bytes] into their fields."""
        words = unpack_words(blocks[:, 2:], 4).reshape(-1, 8, 2)
        codes = (
            split_words(words[..., 0], 8, 4)
            | _with_eighth_sign(split_words(words[..., 1], 7, 4)) << 8
        )
        return BlockFields(
            codes.reshape(-1, 32),
            unpack_f16(blocks[:, :2]),
            scales=_odd_scales(words[..., 1] >> 28 & 15),
        )

    def pack(self, fields: BlockFields) -> "U8":
        """Join fields into stored blocks [blocks, 66 bytes]."""
        import numpy as np

        codes = fields.codes.reshape(-1, 8, 4)
        signs_and_scales = join_words(codes >> 8 & 127, 7) | _stored_scales(fields) << 28
        words = np.stack([join_words(codes & 255, 8), signs_and_scales], axis=-1)
        return concat_bytes(pack_f16(fields.d), pack_words(words.reshape(-1, 16), 4))


class IQ2XS(SignedCodebook):
    """IQ2_XS, 256 values in 74 bytes: d, 32 words with an index of nine bits and seven sign bits,
    then a scale of four bits for every 16 values.
    """

    name, index_bits, factor = "IQ2_XS", 9, 1 / 8

    def unpack(self, blocks: "U8") -> BlockFields:
        """Split stored blocks [blocks, 74 bytes] into their fields."""
        words = unpack_words(blocks[:, 2:66], 2)
        codes = words & 511 | _with_eighth_sign(words >> 9) << 9
        return BlockFields(
            codes, unpack_f16(blocks[:, :2]), scales=_odd_scales(unpack_fields(blocks[:, 66:], 4))
        )

    def pack(self, fields: BlockFields) -> "U8":
        """Join fields into stored blocks [blocks, 74 bytes]."""
        words = pack_words(fields.codes & 0xFFFF, 2)
        return concat_bytes(pack_f16(fields.d), words, pack_fields(_stored_scales(fields), 4))


class IQ2S(SignedCodebook):
    """IQ2_S, 256 values in 82 bytes: d, the low bytes of 32 indices, eight sign bits for each
    index, the top two bits of the indices, then a scale of four bits for every 16 values.
    """

    name, index_bits, factor = "IQ2_S", 10, 1 / 8

    def unpack(self, blocks: "U8") -> BlockFields:
        """Split stored blocks [blocks, 82 bytes] into their fields."""
        low, signs = unpack_words(blocks[:, 2:34], 1), unpack_words(blocks[:, 34:66], 1)
        codes = low | unpack_fields(blocks[:, 66:74], 2) << 8 | signs << 10
        return BlockFields(
            codes, unpack_f16(blocks[:, :2]), scales=_odd_scales(unpack_fields(blocks[:, 74:], 4))
        )

    def pack(self, fields: BlockFields) -> "U8":
        """Join fields into stored blocks [blocks, 82 bytes]."""
        low, top_bits, signs = (
            fields.codes & 255,
            pack_fields(fields.codes >> 8 & 3, 2),
            fields.codes >> 10,
        )
        return concat_bytes(
            pack_f16(fields.d), low, signs, top_bits, pack_fields(_stored_scales(fields), 4)
        )


class IQ3XXS(SignedCodebook):
    """IQ3_XXS, 256 values in 98 bytes: d, 64 indices of eight bits, then for every 32 values four
    times seven sign bits and a scale of four bits.
    """

    name, index_bits, factor = "IQ3_XXS", 8, 1 / 4

    def unpack(self, blocks: "U8") -> BlockFields:
        """Split stored blocks [blocks, 98 bytes] into their fields. Two vectors of four values
        share eight sign bits.
        """
        words = unpack_words(blocks[:, 66:], 4)
        signs = split_words(_with_eighth_sign(split_words(words, 7, 4)), 4, 2).reshape(-1, 64)
        codes = unpack_words(blocks[:, 2:66], 1) | signs << 8
        return BlockFields(codes, unpack_f16(blocks[:, :2]), scales=_odd_scales(words >> 28 & 15))

    def pack(self, fields: BlockFields) -> "U8":
        """Join fields into stored blocks [blocks, 98 bytes]."""
        signs = join_words((fields.codes >> 8).reshape(-1, 8, 4, 2), 4)
        words = join_words(signs & 127, 7) | _stored_scales(fields) << 28
        return concat_bytes(pack_f16(fields.d), fields.codes & 255, pack_words(words, 4))


class IQ3S(SignedCodebook):
    """IQ3_S, 256 values in 110 bytes: d, the low bytes of 64 indices, their top bits, eight sign
    bits for every two vectors, then a scale of four bits for every 32 values.
    """

    name, index_bits, factor = "IQ3_S", 9, 1

    def unpack(self, blocks: "U8") -> BlockFields:
        """Split stored blocks [blocks, 110 bytes] into their fields."""
        codes = (
            unpack_words(blocks[:, 2:66], 1)
            | unpack_fields(blocks[:, 66:74], 1) << 8
            | unpack_fields(blocks[:, 74:106], 4) << 9
        )
        return BlockFields(
            codes, unpack_f16(blocks[:, :2]), scales=_odd_scales(unpack_fields(blocks[:, 106:], 4))
        )

    def pack(self, fields: BlockFields) -> "U8":
        """Join fields into stored blocks [blocks, 110 bytes]."""
        top_bits, signs = pack_fields(fields.codes >> 8 & 1, 1), pack_fields(fields.codes >> 9, 4)
        scales = pack_fields(_stored_scales(fields), 4)
        return concat_bytes(pack_f16(fields.d), fields.codes & 255, top_bits, signs, scales)


class ShiftedCodebook(BlockFormat):
    """A format with vectors of -1, 0 and 1 that are shifted by one eighth. A code has eleven bits
    of index. The bit above them says whether the eighth is added (0) or subtracted (1).
    """

    def levels(self, codes: "Ints") -> "F32":
        """Return the level of each code: the vector from the codebook, with the eighth added or
        subtracted.
        """
        vectors: F32 = (
            lookup(codebook(self.name), codes & 2047)
            + lookup((1 / 8, -1 / 8), codes >> 11)[..., None]
        )
        return vectors


class IQ1S(ShiftedCodebook):
    """IQ1_S, 256 values in 50 bytes: d, the low bytes of 32 indices, then for every four indices a
    word with their top three bits, a scale of three bits and the shift.
    """

    name = "IQ1_S"

    def unpack(self, blocks: "U8") -> BlockFields:
        """Split stored blocks [blocks, 50 bytes] into their fields."""
        words = unpack_words(blocks[:, 34:], 2)  # [blocks, 8]
        top_bits = (split_words(words, 3, 4) | (words >> 15 << 3)[..., None]).reshape(-1, 32)
        return BlockFields(
            unpack_words(blocks[:, 2:34], 1) | top_bits << 8,
            unpack_f16(blocks[:, :2]),
            scales=_odd_scales(words >> 12 & 7),
        )

    def pack(self, fields: BlockFields) -> "U8":
        """Join fields into stored blocks [blocks, 50 bytes]. The four codes of a group must have
        the same shift.
        """
        top_bits = (fields.codes >> 8).reshape(-1, 8, 4)
        shift = top_bits[..., 0] >> 3
        assert (top_bits >> 3 == shift[..., None]).all()
        words = join_words(top_bits & 7, 3) | _stored_scales(fields) << 12 | shift << 15
        return concat_bytes(pack_f16(fields.d), fields.codes & 255, pack_words(words, 2))


class IQ1M(ShiftedCodebook):
    """IQ1_M, 256 values in 56 bytes: the low bytes of 32 indices, a nibble for each index with its
    top three bits and shift, then four words, each with four scales of three bits and a nibble of
    d.
    """

    name = "IQ1_M"

    def unpack(self, blocks: "U8") -> BlockFields:
        """Split stored blocks [blocks, 56 bytes] into their fields. Each scale belongs to 16
        values.
        """
        codes = unpack_words(blocks[:, :32], 1) | unpack_fields(blocks[:, 32:48], 4) << 8
        words = unpack_words(blocks[:, 48:], 2)  # [blocks, 4]
        d = pack_words(join_words(words >> 12, 4)[:, None], 2)
        return BlockFields(
            codes, unpack_f16(d), scales=_odd_scales(split_words(words, 3, 4).reshape(-1, 16))
        )

    def pack(self, fields: BlockFields) -> "U8":
        """Join fields into stored blocks [blocks, 56 bytes]."""
        scales = join_words(_stored_scales(fields).reshape(-1, 4, 4), 3)
        words = scales | split_words(unpack_words(pack_f16(fields.d), 2)[:, 0], 4, 4) << 12
        return concat_bytes(
            fields.codes & 255, pack_fields(fields.codes >> 8, 4), pack_words(words, 2)
        )


FORMATS = (IQ2XXS(), IQ2XS(), IQ2S(), IQ3XXS(), IQ3S(), IQ1S(), IQ1M())
