"""Sums over the values of many groups at once, which determine the best scale and minimum of each
group.

A group is a set of values that share a scale. Arrays are [values of a group, groups of a block,
blocks], so that every operation runs over thousands of groups. For levels L (codes counted from the
code of zero) and weights w, the sums of wL, wL² and wLx give the best scale and minimum, and also
the error of any other scale and minimum, without another pass over the values.
"""

from typing import NamedTuple

from quant.native.array_backends import Array, ArrayBackend

ZERO_GUARD = (
    # added to squared scales. A scale whose square is smaller counts as zero, because F16 cannot
    # represent it
    1e-36
)
# fraction of w·w below which F32 cannot distinguish the effects of a scale and a minimum
MIN_DETERMINANT = 1e-5


class LevelSums(NamedTuple):
    """The sums of w L (None if groups have no minimum), of w L² and of w L x, for each group."""

    levels: Array
    squares: Array
    products: Array

    def where(self, ops: ArrayBackend, which: Array, others: "LevelSums") -> "LevelSums":
        """Return these sums for the groups where `which` is set, and the `others` elsewhere."""
        pairs = zip(self, others, strict=True)
        return LevelSums(
            *(
                None if own_sum is None else ops.where(which, own_sum, other)
                for own_sum, other in pairs
            )
        )


class GroupSums:
    """Values x and weights w [values of a group, groups of a block, blocks], for levels L from
    `low` to `high` with x ≈ scale L + least.

    `max_minimum` is the largest allowed minimum, None if groups have no minimum. sums() and
    levels() write into a scratch array, so each thread needs its own instance.
    """

    def __init__(
        self, ops: ArrayBackend, x: Array, w: Array, low: int, high: int, most: float | None
    ) -> None:
        self.ops, self.x, self.w, self.low, self.high, self.max_minimum = ops, x, w, low, high, most
        self.scratch, self.wx = ops.empty_like(x), w * x
        self.weight_sum, self.product_sum = ops.sum(w), ops.sum(self.wx)

    def levels(self, scale: Array, least: Array | None) -> Array:
        """Return the levels that are nearest to the values."""
        ops, inverse, out = self.ops, invert(scale), self.scratch
        ops.multiply(self.x, inverse, out=out)
        if least is not None:
            ops.add(out, -least * inverse, out=out)
        ops.round(out, out=out)
        return ops.clip(out, self.low, self.high, out=out)

    def sums(self, scale: Array, least: Array | None) -> LevelSums:
        """Return the sums for the levels that are nearest to the values."""
        ops, levels = self.ops, self.levels(scale, least)
        plain = None if self.max_minimum is None else ops.dot(self.w, levels)
        return LevelSums(plain, ops.dot(self.w, levels, levels), ops.dot(self.wx, levels))

    def best_scales(self, sums: LevelSums) -> tuple[Array, Array | None]:
        """Return the scale and the minimum with the least error for the levels of `sums`, by
        weighted least squares.
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
        # If all levels of a group are equal, they do not determine both: for level 0 there is only
        # a minimum, else only a scale.
        level = (sums.squares == 0) * ops.clip(
            self.product_sum / self.weight_sum, -LARGEST_F32, self.max_minimum
        )
        return ops.where(usable, scale, without_minimum), ops.where(usable, least, level)

    def error(self, scale: Array, least: Array | None, sums: LevelSums) -> Array:
        """Return the error of each group for the levels of `sums`, without a constant: the sum of w
        (scale L + least - x)² minus the sum of w x².
        """
        error = scale * (scale * sums.squares - 2 * sums.products)
        if least is None:
            return error
        return error + least * (
            2 * scale * sums.levels + least * self.weight_sum - 2 * self.product_sum
        )


LARGEST_F32 = 3e38  # a number close to the largest F32


def invert(values: Array) -> Array:
    """Return 1 / value, but 0 for values near zero."""
    return values / (values * values + ZERO_GUARD)
