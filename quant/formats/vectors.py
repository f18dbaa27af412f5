"""The formats whose codes stand for vectors of four or eight values out of a grid: IQ1, IQ2 and
IQ3.

Layouts of ggml/src/ggml-common.h and the dequantize_row functions of ggml/src/ggml-quants.c; the
grids are the gguf package's. A code is a place in the grid, and in the bits above it what turns or
shifts the vector. There is no `code` here: the values of a vector have to be chosen together, and
fit() lets ggml do that. Its encoder needs up to most of a minute for its tables, the first time.
"""

from functools import cache
from typing import TYPE_CHECKING

from quant.formats.base import Fields, Format, looked_up
from quant.formats.bits import (
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
    from quant.native import F32, U8


@cache
def grid(name: str) -> "F32":
    """The vectors [places, 4 or 8] of a format, out of the gguf package's tables."""
    from gguf import quants

    kind = getattr(quants, name)
    kind.init_grid()
    vectors: F32 = kind.grid[0, 0]
    return vectors


@cache
def signs(count: int) -> "F32":
    """1 and -1 [2 ** count, count]: value j is negative where bit j is set."""
    import numpy as np

    return (1 - 2 * (np.arange(1 << count)[:, None] >> np.arange(count) & 1)).astype(np.float32)


class Turned(Format):
    """Each value has a sign of its own: bit j above the `places` bits of a code is set where value
    j is negative.

    Scales are odd, as ggml adds a half to what is stored; `unit` is what it multiplies with
    besides, halved.
    """

    places: int
    unit: float

    def levels(self, codes: "Ints") -> "F32":
        """The values of each vector, in steps of the scale."""
        vectors = looked_up(grid(self.name), codes & (1 << self.places) - 1)
        turned: F32 = (
            vectors * looked_up(signs(vectors.shape[-1]), codes >> self.places) * self.unit
        )
        return turned


def _even(seven: "Ints") -> "Ints":
    """Seven signs -> eight, of which an even number is set: the last is not stored."""
    import numpy as np

    return seven | (np.bitwise_count(seven) & 1).astype(np.int32) << 7


def _odd(stored: "Ints") -> "Ints":
    """A scale as it is multiplied with, in halves: 1, 3, 5 …"""
    return 2 * stored + 1


def _stored_odd(fields: Fields) -> "Ints":
    import numpy as np

    assert fields.scales is not None
    return fields.scales.astype(np.int32) >> 1


class IQ2XXS(Turned):
    """d, then for every 32 values four places of eight bits, four times seven signs and a scale of
    four bits.
    """

    name, places, unit = "IQ2_XXS", 8, 1 / 8

    def unpack(self, blocks: "U8") -> Fields:
        """Take blocks [blocks, 66] apart."""
        pairs = words(blocks[:, 2:], 4).reshape(-1, 8, 2)
        codes = split(pairs[..., 0], 8, 4) | _even(split(pairs[..., 1], 7, 4)) << 8
        return Fields(
            codes.reshape(-1, 32), halves(blocks[:, :2]), scales=_odd(pairs[..., 1] >> 28 & 15)
        )

    def pack(self, fields: Fields) -> "U8":
        """Put blocks together."""
        import numpy as np

        codes = fields.codes.reshape(-1, 8, 4)
        turns = stored_split(codes >> 8 & 127, 7) | _stored_odd(fields) << 28
        pairs = np.stack([stored_split(codes & 255, 8), turns], axis=-1)
        return joined(stored_halves(fields.d), stored_words(pairs.reshape(-1, 16), 4))


class IQ2XS(Turned):
    """d, words of nine bits for a place and seven signs, and scales of four bits for every 16
    values.
    """

    name, places, unit = "IQ2_XS", 9, 1 / 8

    def unpack(self, blocks: "U8") -> Fields:
        """Take blocks [blocks, 74] apart."""
        pairs = words(blocks[:, 2:66], 2)
        codes = pairs & 511 | _even(pairs >> 9) << 9
        return Fields(codes, halves(blocks[:, :2]), scales=_odd(in_turn(blocks[:, 66:], 4)))

    def pack(self, fields: Fields) -> "U8":
        """Put blocks together."""
        pairs = stored_words(fields.codes & 0xFFFF, 2)
        return joined(stored_halves(fields.d), pairs, stored_in_turn(_stored_odd(fields), 4))


class IQ2S(Turned):
    """d, the low bytes of 32 places, eight signs for each, the two bits above, and scales as in
    IQ2_XS.
    """

    name, places, unit = "IQ2_S", 10, 1 / 8

    def unpack(self, blocks: "U8") -> Fields:
        """Take blocks [blocks, 82] apart."""
        low, turns = words(blocks[:, 2:34], 1), words(blocks[:, 34:66], 1)
        codes = low | in_turn(blocks[:, 66:74], 2) << 8 | turns << 10
        return Fields(codes, halves(blocks[:, :2]), scales=_odd(in_turn(blocks[:, 74:], 4)))

    def pack(self, fields: Fields) -> "U8":
        """Put blocks together."""
        low, top, turns = (
            fields.codes & 255,
            stored_in_turn(fields.codes >> 8 & 3, 2),
            fields.codes >> 10,
        )
        return joined(
            stored_halves(fields.d), low, turns, top, stored_in_turn(_stored_odd(fields), 4)
        )


class IQ3XXS(Turned):
    """d, 64 places of eight bits, and for every 32 values four times seven signs and a scale of
    four bits.
    """

    name, places, unit = "IQ3_XXS", 8, 1 / 4

    def unpack(self, blocks: "U8") -> Fields:
        """Take blocks [blocks, 98] apart; a vector has four of the eight signs."""
        pairs = words(blocks[:, 66:], 4)
        turns = split(_even(split(pairs, 7, 4)), 4, 2).reshape(-1, 64)
        codes = words(blocks[:, 2:66], 1) | turns << 8
        return Fields(codes, halves(blocks[:, :2]), scales=_odd(pairs >> 28 & 15))

    def pack(self, fields: Fields) -> "U8":
        """Put blocks together."""
        turns = stored_split((fields.codes >> 8).reshape(-1, 8, 4, 2), 4)
        pairs = stored_split(turns & 127, 7) | _stored_odd(fields) << 28
        return joined(stored_halves(fields.d), fields.codes & 255, stored_words(pairs, 4))


class IQ3S(Turned):
    """d, the low bytes of 64 places, the bits above, eight signs for two of them, four bits of
    scale for 32 values.
    """

    name, places, unit = "IQ3_S", 9, 1

    def unpack(self, blocks: "U8") -> Fields:
        """Take blocks [blocks, 110] apart."""
        codes = (
            words(blocks[:, 2:66], 1)
            | in_turn(blocks[:, 66:74], 1) << 8
            | in_turn(blocks[:, 74:106], 4) << 9
        )
        return Fields(codes, halves(blocks[:, :2]), scales=_odd(in_turn(blocks[:, 106:], 4)))

    def pack(self, fields: Fields) -> "U8":
        """Put blocks together."""
        top, turns = stored_in_turn(fields.codes >> 8 & 1, 1), stored_in_turn(fields.codes >> 9, 4)
        scales = stored_in_turn(_stored_odd(fields), 4)
        return joined(stored_halves(fields.d), fields.codes & 255, top, turns, scales)


class Shifted(Format):
    """Vectors of -1, 0 and 1; the bit above a place's eleven says that an eighth is taken away,
    else it is added.
    """

    def levels(self, codes: "Ints") -> "F32":
        """The values of each vector, in steps of the scale."""
        shifted: F32 = (
            looked_up(grid(self.name), codes & 2047)
            + looked_up((1 / 8, -1 / 8), codes >> 11)[..., None]
        )
        return shifted


class IQ1S(Shifted):
    """d, the low bytes of 32 places, and for four of them three bits above each, a scale of three
    bits, the shift.
    """

    name = "IQ1_S"

    def unpack(self, blocks: "U8") -> Fields:
        """Take blocks [blocks, 50] apart."""
        above = words(blocks[:, 34:], 2)  # [blocks, 8]
        top = (split(above, 3, 4) | (above >> 15 << 3)[..., None]).reshape(-1, 32)
        return Fields(
            words(blocks[:, 2:34], 1) | top << 8,
            halves(blocks[:, :2]),
            scales=_odd(above >> 12 & 7),
        )

    def pack(self, fields: Fields) -> "U8":
        """Put blocks together; the four codes of a group share their shift."""
        top = (fields.codes >> 8).reshape(-1, 8, 4)
        shift = top[..., 0] >> 3
        assert (top >> 3 == shift[..., None]).all()
        above = stored_split(top & 7, 3) | _stored_odd(fields) << 12 | shift << 15
        return joined(stored_halves(fields.d), fields.codes & 255, stored_words(above, 2))


class IQ1M(Shifted):
    """The low bytes of 32 places, a nibble above each with its shift, four words of four scales and
    a nibble of d.
    """

    name = "IQ1_M"

    def unpack(self, blocks: "U8") -> Fields:
        """Take blocks [blocks, 56] apart; scales are for 16 values."""
        codes = words(blocks[:, :32], 1) | in_turn(blocks[:, 32:48], 4) << 8
        pairs = words(blocks[:, 48:], 2)  # [blocks, 4]
        d = stored_words(stored_split(pairs >> 12, 4)[:, None], 2)
        return Fields(codes, halves(d), scales=_odd(split(pairs, 3, 4).reshape(-1, 16)))

    def pack(self, fields: Fields) -> "U8":
        """Put blocks together."""
        scales = stored_split(_stored_odd(fields).reshape(-1, 4, 4), 3)
        pairs = scales | split(words(stored_halves(fields.d), 2)[:, 0], 4, 4) << 12
        return joined(
            fields.codes & 255, stored_in_turn(fields.codes >> 8, 4), stored_words(pairs, 2)
        )


FORMATS = (IQ2XXS(), IQ2XS(), IQ2S(), IQ3XXS(), IQ3S(), IQ1S(), IQ1M())
