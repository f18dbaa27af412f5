"""Sums over many groups of values at once, which determine the best scale and minimum of each.

A group is the values that share a scale; arrays are [values, groups of a block, blocks], so that
every operation runs over thousands of groups. For levels L (codes counted from that of zero) and
weights w, the sums of wL, wL² and wLx give the best scale and minimum, and the error of any others,
without another pass over the values.
"""

from typing import NamedTuple

from quant.native.array_backends import Array, ArrayBackend

ZERO_GUARD = (
    1e-36  # added to squared scales; below it a scale counts as zero, because no F16 holds it
)
MIN_DETERMINANT = 1e-5  # fraction of w·w below which F32 cannot separate a scale from a minimum


class LevelSums(NamedTuple):
    """The sums of w L (None where groups have no minimum), of w L² and of w L x, for each group."""

    levels: Array
    squares: Array
    products: Array

    def where(self, ops: ArrayBackend, which: Array, others: "LevelSums") -> "LevelSums":
        """Return these sums where `which` is set, else the others."""
        pairs = zip(self, others, strict=True)
        return LevelSums(
            *(
                None if own_sum is None else ops.where(which, own_sum, other)
                for own_sum, other in pairs
            )
        )


class GroupSums:
    """Values x and weights w [values, groups, blocks], for levels from `low` to `high` with x near
    scale L + least.

    `max_minimum` is the largest allowed minimum, None if groups have no minimum. sums() and
    levels() write into a scratch array: use one instance per thread.
    """

    def __init__(
        self, ops: ArrayBackend, x: Array, w: Array, low: int, high: int, most: float | None
    ) -> None:
        self.ops, self.x, self.w, self.low, self.high, self.max_minimum = ops, x, w, low, high, most
        self.scratch, self.wx = ops.empty_like(x), w * x
        self.weight_sum, self.product_sum = ops.sum(w), ops.sum(self.wx)

    def levels(self, scale: Array, least: Array | None) -> Array:
        """Return the levels nearest to the values."""
        ops, inverse, out = self.ops, invert(scale), self.scratch
        ops.multiply(self.x, inverse, out=out)
        if least is not None:
            ops.add(out, -least * inverse, out=out)
        ops.round(out, out=out)
        return ops.clip(out, self.low, self.high, out=out)

    def sums(self, scale: Array, least: Array | None) -> LevelSums:
        """Return the sums of the nearest levels."""
        ops, levels = self.ops, self.levels(scale, least)
        plain = None if self.max_minimum is None else ops.dot(self.w, levels)
        return LevelSums(plain, ops.dot(self.w, levels, levels), ops.dot(self.wx, levels))

    def best_scales(self, sums: LevelSums) -> tuple[Array, Array | None]:
        """Return the scale and minimum with the least error for these levels, by weighted least
        squares.
        """
        ops = self.ops
        without_minimum = sums.products * invert(sums.squares)
        if self.max_minimum is None:
            return without_minimum, None
        product = self.weight_sum * sums.squares
        determinant = product - sums.levels * sums.levels
        inverse = invert(determinant)
        scale = (self.weight_sum * sums.products - self.product_sum * sums.levels) * inverse
        least = (sums.squares * self.product_sum - sums.levels * sums.products) * inverse
        usable = (determinant > MIN_DETERMINANT * product) & (least <= self.max_minimum)
        # Equal levels do not determine both: with level 0 there is only a minimum, else only a
        # scale.
        level = (sums.squares == 0) * ops.clip(
            self.product_sum / self.weight_sum, -LARGEST_F32, self.max_minimum
        )
        return ops.where(usable, scale, without_minimum), ops.where(usable, least, level)

    def error(self, scale: Array, least: Array | None, sums: LevelSums) -> Array:
        """Return for each group the sum of w (scale L + least - x)², less the sum of w x²."""
        error = scale * (scale * sums.squares - 2 * sums.products)
        if least is None:
            return error
        return error + least * (
            2 * scale * sums.levels + least * self.weight_sum - 2 * self.product_sum
        )


LARGEST_F32 = 3e38  # close to the largest F32


def invert(values: Array) -> Array:
    """Return 1 / value, and 0 for values near zero."""
    return values / (values * values + ZERO_GUARD)
