"""The formats whose codes stand for vectors of four or eight values from a codebook: IQ1, IQ2 and
IQ3.

A code is an index into the codebook; the bits above the index flip the signs of the vector or shift
it. These formats have no `nearest_codes`, because the values of a vector have to be chosen
together; fit() lets ggml choose them. The first call of ggml's encoder takes up to most of a minute
to build its tables.

Source: layouts of ggml/src/ggml-common.h and the dequantize_row functions of
ggml/src/ggml-quants.c; the codebooks are those of the gguf package.
"""

from functools import cache
from typing import TYPE_CHECKING

from quant.formats.base import Fields, Format, looked_up
from quant.formats.bit_packing import (
    halves,
    in_turn,
    joined,
    split,
    stored_halves,
    stored_in_turn,
    stored_split,
    stored_words,
    words,
)

if TYPE_CHECKING:
    from quant.formats.base import Ints
    from quant.native.ggml import F32, U8


@cache
def grid(name: str) -> "F32":
    """Return the vectors [entries, 4 or 8] of a format's codebook, from the gguf package's
    tables.
    """
    from gguf import quants

    kind = getattr(quants, name)
    kind.init_grid()
    vectors: F32 = kind.grid[0, 0]
    return vectors


@cache
def signs(count: int) -> "F32":
    """Return signs 1 and -1 [2 ** count, count]: value j is negative where bit j is set."""
    import numpy as np

    return (1 - 2 * (np.arange(1 << count)[:, None] >> np.arange(count) & 1)).astype(np.float32)


class Turned(Format):
    """A format in which each value has its own sign: bit j above the `index_bits` bits of a code is
    set where value j is negative.

    Scales are odd, because ggml adds one half to the stored scale; `unit` is half of ggml's other
    constant factor.
    """

    places: int
    unit: float

    def levels(self, codes: "Ints") -> "F32":
        """Return the values of each vector in steps of the scale."""
        vectors = looked_up(grid(self.name), codes & (1 << self.places) - 1)
        signed: F32 = (
            vectors * looked_up(signs(vectors.shape[-1]), codes >> self.places) * self.unit
        )
        return signed


def _even(seven: "Ints") -> "Ints":
    """Append the eighth sign to seven stored ones, so that an even number of signs is set."""
    import numpy as np

    return seven | (np.bitwise_count(seven) & 1).astype(np.int32) << 7


def _odd(stored: "Ints") -> "Ints":
    """Return the scale that values are multiplied with, in halves: 1, 3, 5 …"""
    return 2 * stored + 1


def _stored_odd(fields: Fields) -> "Ints":
    import numpy as np

    assert fields.scales is not None
    return fields.scales.astype(np.int32) >> 1


class IQ2XXS(Turned):
    """IQ2_XXS: d, then for every 32 values four indices of eight bits, four times seven signs, and
    a scale of four bits.
    """

    name, places, unit = "IQ2_XXS", 8, 1 / 8

    def unpack(self, blocks: "U8") -> Fields:
        """Split blocks [blocks, 66] into fields."""
        pairs = words(blocks[:, 2:], 4).reshape(-1, 8, 2)
        codes = split(pairs[..., 0], 8, 4) | _even(split(pairs[..., 1], 7, 4)) << 8
        return Fields(
            codes.reshape(-1, 32), halves(blocks[:, :2]), scales=_odd(pairs[..., 1] >> 28 & 15)
        )

    def pack(self, fields: Fields) -> "U8":
        """Join fields into blocks [blocks, 66]."""
        import numpy as np

        codes = fields.codes.reshape(-1, 8, 4)
        turns = stored_split(codes >> 8 & 127, 7) | _stored_odd(fields) << 28
        pairs = np.stack([stored_split(codes & 255, 8), turns], axis=-1)
        return joined(stored_halves(fields.d), stored_words(pairs.reshape(-1, 16), 4))


class IQ2XS(Turned):
    """IQ2_XS: d, words with nine bits of index and seven signs, and scales of four bits for every
    16 values.
    """

    name, places, unit = "IQ2_XS", 9, 1 / 8

    def unpack(self, blocks: "U8") -> Fields:
        """Split blocks [blocks, 74] into fields."""
        pairs = words(blocks[:, 2:66], 2)
        codes = pairs & 511 | _even(pairs >> 9) << 9
        return Fields(codes, halves(blocks[:, :2]), scales=_odd(in_turn(blocks[:, 66:], 4)))

    def pack(self, fields: Fields) -> "U8":
        """Join fields into blocks [blocks, 74]."""
        pairs = stored_words(fields.codes & 0xFFFF, 2)
        return joined(stored_halves(fields.d), pairs, stored_in_turn(_stored_odd(fields), 4))


class IQ2S(Turned):
    """IQ2_S: d, the low bytes of 32 indices, eight signs for each, the top two bits of the indices,
    and scales as in IQ2_XS.
    """

    name, places, unit = "IQ2_S", 10, 1 / 8

    def unpack(self, blocks: "U8") -> Fields:
        """Split blocks [blocks, 82] into fields."""
        low, turns = words(blocks[:, 2:34], 1), words(blocks[:, 34:66], 1)
        codes = low | in_turn(blocks[:, 66:74], 2) << 8 | turns << 10
        return Fields(codes, halves(blocks[:, :2]), scales=_odd(in_turn(blocks[:, 74:], 4)))

    def pack(self, fields: Fields) -> "U8":
        """Join fields into blocks [blocks, 82]."""
        low, top, turns = (
            fields.codes & 255,
            stored_in_turn(fields.codes >> 8 & 3, 2),
            fields.codes >> 10,
        )
        return joined(
            stored_halves(fields.d), low, turns, top, stored_in_turn(_stored_odd(fields), 4)
        )


class IQ3XXS(Turned):
    """IQ3_XXS: d, 64 indices of eight bits, and for every 32 values four times seven signs and a
    scale of four bits.
    """

    name, places, unit = "IQ3_XXS", 8, 1 / 4

    def unpack(self, blocks: "U8") -> Fields:
        """Split blocks [blocks, 98] into fields; a vector has four of the eight signs."""
        pairs = words(blocks[:, 66:], 4)
        turns = split(_even(split(pairs, 7, 4)), 4, 2).reshape(-1, 64)
        codes = words(blocks[:, 2:66], 1) | turns << 8
        return Fields(codes, halves(blocks[:, :2]), scales=_odd(pairs >> 28 & 15))

    def pack(self, fields: Fields) -> "U8":
        """Join fields into blocks [blocks, 98]."""
        turns = stored_split((fields.codes >> 8).reshape(-1, 8, 4, 2), 4)
        pairs = stored_split(turns & 127, 7) | _stored_odd(fields) << 28
        return joined(stored_halves(fields.d), fields.codes & 255, stored_words(pairs, 4))


class IQ3S(Turned):
    """IQ3_S: d, the low bytes of 64 indices, their top bits, eight signs for every two vectors, and
    four bits of scale for every 32 values.
    """

    name, places, unit = "IQ3_S", 9, 1

    def unpack(self, blocks: "U8") -> Fields:
        """Split blocks [blocks, 110] into fields."""
        codes = (
            words(blocks[:, 2:66], 1)
            | in_turn(blocks[:, 66:74], 1) << 8
            | in_turn(blocks[:, 74:106], 4) << 9
        )
        return Fields(codes, halves(blocks[:, :2]), scales=_odd(in_turn(blocks[:, 106:], 4)))

    def pack(self, fields: Fields) -> "U8":
        """Join fields into blocks [blocks, 110]."""
        top, turns = stored_in_turn(fields.codes >> 8 & 1, 1), stored_in_turn(fields.codes >> 9, 4)
        scales = stored_in_turn(_stored_odd(fields), 4)
        return joined(stored_halves(fields.d), fields.codes & 255, top, turns, scales)


class Shifted(Format):
    """A format with vectors of -1, 0 and 1; the bit above the eleven bits of the index says whether
    one eighth is subtracted or added.
    """

    def levels(self, codes: "Ints") -> "F32":
        """Return the values of each vector in steps of the scale."""
        vectors: F32 = (
            looked_up(grid(self.name), codes & 2047)
            + looked_up((1 / 8, -1 / 8), codes >> 11)[..., None]
        )
        return vectors


class IQ1S(Shifted):
    """IQ1_S: d, the low bytes of 32 indices, and for every four of them their top three bits, a
    scale of three bits and the shift.
    """

    name = "IQ1_S"

    def unpack(self, blocks: "U8") -> Fields:
        """Split blocks [blocks, 50] into fields."""
        above = words(blocks[:, 34:], 2)  # [blocks, 8]
        top_bits = (split(above, 3, 4) | (above >> 15 << 3)[..., None]).reshape(-1, 32)
        return Fields(
            words(blocks[:, 2:34], 1) | top_bits << 8,
            halves(blocks[:, :2]),
            scales=_odd(above >> 12 & 7),
        )

    def pack(self, fields: Fields) -> "U8":
        """Join fields into blocks [blocks, 50]; the four codes of a group share their shift."""
        top = (fields.codes >> 8).reshape(-1, 8, 4)
        shift = top[..., 0] >> 3
        assert (top >> 3 == shift[..., None]).all()
        above = stored_split(top & 7, 3) | _stored_odd(fields) << 12 | shift << 15
        return joined(stored_halves(fields.d), fields.codes & 255, stored_words(above, 2))


class IQ1M(Shifted):
    """IQ1_M: the low bytes of 32 indices, a nibble for each with its top bits and shift, then four
    words with four scales and a nibble of d each.
    """

    name = "IQ1_M"

    def unpack(self, blocks: "U8") -> Fields:
        """Split blocks [blocks, 56] into fields; each scale covers 16 values."""
        codes = words(blocks[:, :32], 1) | in_turn(blocks[:, 32:48], 4) << 8
        pairs = words(blocks[:, 48:], 2)  # [blocks, 4]
        d = stored_words(stored_split(pairs >> 12, 4)[:, None], 2)
        return Fields(codes, halves(d), scales=_odd(split(pairs, 3, 4).reshape(-1, 16)))

    def pack(self, fields: Fields) -> "U8":
        """Join fields into blocks [blocks, 56]."""
        scales = stored_split(_stored_odd(fields).reshape(-1, 4, 4), 3)
        pairs = scales | split(words(stored_halves(fields.d), 2)[:, 0], 4, 4) << 12
        return joined(
            fields.codes & 255, stored_in_turn(fields.codes >> 8, 4), stored_words(pairs, 2)
        )


FORMATS = (IQ2XXS(), IQ2XS(), IQ2S(), IQ3XXS(), IQ3S(), IQ1S(), IQ1M())
