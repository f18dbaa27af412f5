"""Many groups of values side by side, and what a choice of codes adds up to in each of them.

A group is what shares a scale: [values, groups of a block, blocks], so that every operation runs
over thousands of groups at once. For levels L (codes counted from that of zero) and weights w the
sums of wL, wL² and wLx tell the best scale and minimum, and the error of any others, without
looking at the values again. It knows numbers, no formats.
"""

from typing import NamedTuple

from quant.accelerate import Array, Ops

NOTHING = 1e-36  # the square of a scale that is none: no F16 holds it
SINGULAR = 1e-5  # of w·w: below it a scale and a minimum cannot be told apart in F32


class Sums(NamedTuple):
    """For each group: the sums of w L (None where groups have no minimum), of w L² and of w L x."""

    plain: Array
    square: Array
    along: Array

    def where(self, ops: Ops, which: Array, others: "Sums") -> "Sums":
        """These where `which`, else the others."""
        pairs = zip(self, others, strict=True)
        return Sums(
            *(None if mine is None else ops.where(which, mine, other) for mine, other in pairs)
        )


class Lanes:
    """Values x and weights w, [values, groups, blocks], for levels from `low` to `high`: x is near
    scale L + least.

    `least` None means that groups have no minimum; else it is the largest that a minimum may be.
    sums() and levels() write into a scratch: one thread for one Lanes.
    """

    def __init__(
        self, ops: Ops, x: Array, w: Array, low: int, high: int, most: float | None
    ) -> None:
        self.ops, self.x, self.w, self.low, self.high, self.most = ops, x, w, low, high, most
        self.nearest, self.wx = ops.empty_like(x), w * x
        self.weight, self.along = ops.total(w), ops.total(self.wx)

    def levels(self, scale: Array, least: Array | None) -> Array:
        """The levels nearest to the values."""
        ops, inverse, out = self.ops, inverted(scale), self.nearest
        ops.multiply(self.x, inverse, out=out)
        if least is not None:
            ops.add(out, -least * inverse, out=out)
        ops.round(out, out=out)
        return ops.clip(out, self.low, self.high, out=out)

    def sums(self, scale: Array, least: Array | None) -> Sums:
        """What the nearest levels add up to."""
        ops, levels = self.ops, self.levels(scale, least)
        plain = None if self.most is None else ops.dot(self.w, levels)
        return Sums(plain, ops.dot(self.w, levels, levels), ops.dot(self.wx, levels))

    def best(self, sums: Sums) -> tuple[Array, Array | None]:
        """The scale and the minimum with the least error for these levels: weighted least squares."""
        ops = self.ops
        alone = sums.along * inverted(sums.square)  # the best scale without a minimum
        if self.most is None:
            return alone, None
        both = self.weight * sums.square
        apart = both - sums.plain * sums.plain
        inverse = inverted(apart)
        scale = (self.weight * sums.along - self.along * sums.plain) * inverse
        least = (sums.square * self.along - sums.plain * sums.along) * inverse
        usable = (apart > SINGULAR * both) & (least <= self.most)
        # Levels that are all the same leave the choice: with level 0 there is a minimum only, else
        # a scale only.
        level = (sums.square == 0) * ops.clip(self.along / self.weight, -LARGE, self.most)
        return ops.where(usable, scale, alone), ops.where(usable, least, level)

    def error(self, scale: Array, least: Array | None, sums: Sums) -> Array:
        """Of each group: the sum of w (scale L + least - x)², less the sum of w x²."""
        error = scale * (scale * sums.square - 2 * sums.along)
        if least is None:
            return error
        return error + least * (2 * scale * sums.plain + least * self.weight - 2 * self.along)


LARGE = 3e38  # nearly all that F32 holds


def inverted(values: Array) -> Array:
    """1 / value, and 0 where there is none."""
    return values / (values * values + NOTHING)
