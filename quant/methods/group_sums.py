"""Sums over the values of many groups at once, from which the best scale and minimum of each group
follow.

A group is a set of values that share a scale. Arrays are [values of a group, groups of a block,
blocks], so that every operation runs over thousands of groups. For levels L (codes counted from the
code of zero) and weights w, the sums of wL, wL² and wLx give the best scale and minimum. They also
give the error of any other scale and minimum, without another pass over the values.
"""

from typing import NamedTuple

from quant.native.array_backends import Array, ArrayBackend

# Added to squared scales. A scale whose square is smaller counts as zero, because F16 cannot
# represent it.
ZERO_GUARD = 1e-36
# If the determinant of the least-squares problem is below this fraction of its first product, F32
# cannot distinguish the effects of a scale and a minimum.
MIN_DETERMINANT = 1e-5
LARGEST_F32 = 3e38  # a number close to the largest F32


class LevelSums(NamedTuple):
    """Three sums over the values of each group [groups of a block, blocks], for given levels L:
    `levels` is the sum of w L (None if groups have no minimum), `squares` of w L², `products` of w
    L x.
    """

    levels: Array
    squares: Array
    products: Array

    def where(self, ops: ArrayBackend, which: Array, others: "LevelSums") -> "LevelSums":
        """Return these sums for the groups where `which` is true, and the sums in `others`
        elsewhere.
        """
        pairs = zip(self, others, strict=True)
        return LevelSums(
            *(
                None if own_sum is None else ops.where(which, own_sum, other)
                for own_sum, other in pairs
            )
        )


class GroupSums:
    """Values x of many groups with their weights w, [values of a group, groups of a block, blocks]
    each. A value is approximated by x ≈ scale L + minimum, with levels L from `low` to `high`.

    `max_minimum` is the largest allowed minimum, None if groups have no minimum. sums() and
    levels() write into a scratch array, so that each thread needs its own instance.
    """

    def __init__(
        self, ops: ArrayBackend, x: Array, w: Array, low: int, high: int, max_minimum: float | None
    ) -> None:
        self.ops, self.x, self.w, self.low, self.high, self.max_minimum = (
            ops,
            x,
            w,
            low,
            high,
            max_minimum,
        )
        self.scratch, self.wx = ops.empty_like(x), w * x
        self.weight_sum, self.product_sum = ops.sum(w), ops.sum(self.wx)

    def levels(self, scale: Array, minimum: Array | None) -> Array:
        """Return the level that is nearest to each value, given the scale and the minimum of each
        group. The returned array is overwritten by the next call.
        """
        ops, inverse, levels = self.ops, invert(scale), self.scratch
        ops.multiply(self.x, inverse, out=levels)
        if minimum is not None:
            ops.add(levels, -minimum * inverse, out=levels)
        ops.round(levels, out=levels)
        return ops.clip(levels, self.low, self.high, out=levels)

    def sums(self, scale: Array, minimum: Array | None) -> LevelSums:
        """Return the sums for the levels that are nearest to the values, given the scale and the
        minimum of each group.
        """
        ops, levels = self.ops, self.levels(scale, minimum)
        level_sums = None if self.max_minimum is None else ops.dot(self.w, levels)
        return LevelSums(level_sums, ops.dot(self.w, levels, levels), ops.dot(self.wx, levels))

    def best_scales(self, sums: LevelSums) -> tuple[Array, Array | None]:
        """Return the scale and the minimum (or None) with the lowest error for the levels of
        `sums`, by weighted least squares.
        """
        ops = self.ops
        without_minimum = sums.products * invert(sums.squares)
        if self.max_minimum is None:
            return without_minimum, None
        product = self.weight_sum * sums.squares
        determinant = product - sums.levels * sums.levels
        inverse = invert(determinant)
        scale = (self.weight_sum * sums.products - self.product_sum * sums.levels) * inverse
        minimum = (sums.squares * self.product_sum - sums.levels * sums.products) * inverse
        usable = (determinant > MIN_DETERMINANT * product) & (minimum <= self.max_minimum)
        # If all levels of a group are equal, they cannot determine both scale and minimum: for
        # level 0 only the minimum is computed, for any other level only the scale.
        single_minimum = (sums.squares == 0) * ops.clip(
            self.product_sum / self.weight_sum, -LARGEST_F32, self.max_minimum
        )
        return ops.where(usable, scale, without_minimum), ops.where(usable, minimum, single_minimum)

    def error(self, scale: Array, minimum: Array | None, sums: LevelSums) -> Array:
        """Return the error of each group for the levels of `sums`, without a constant: the sum of w
        (scale L + minimum - x)² minus the sum of w x².
        """
        error = scale * (scale * sums.squares - 2 * sums.products)
        if minimum is None:
            return error
        return error + minimum * (
            2 * scale * sums.levels + minimum * self.weight_sum - 2 * self.product_sum
        )


def invert(values: Array) -> Array:
    """Return 1 / value, but 0 for values whose inverse would be meaningless because F16 cannot
    represent them.
    """
    return values / (values * values + ZERO_GUARD)
