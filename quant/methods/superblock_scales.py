"""The search for the integer scales and minimums of a superblock, together with the codes.

ggml only rounds the scales to integers. Here scales, minimums and codes are searched again after
the superblock's F16 scale is rounded: neighboring integers are tried, the best integer for given
codes is computed, and d and m are fitted again to all values of the superblock. A change is
accepted only if it lowers the error.
"""

from collections.abc import Sequence
from typing import NamedTuple

from quant.methods.group_sums import GroupSums, LevelSums, invert
from quant.native.array_backends import Array


class SuperblockScales(NamedTuple):
    """The scales of superblocks. `d` and `m` [blocks] are rounded to F16; `scales` and `mins`
    [groups, blocks] are integers. The scale of a group is d * scales, and its minimum is -m * mins.

    `m` and `mins` are None if groups have no minimum. `scales` is None in formats with one scale
    for each block.
    """

    d: Array
    m: Array
    scales: Array
    mins: Array

    @property
    def group_steps(self) -> Array:
        """Scale of each group [groups, blocks]."""
        return self.d * self.scales

    @property
    def group_minimums(self) -> Array:
        """Minimum of each group [groups, blocks], None if groups have no minimum."""
        return None if self.m is None else -(self.m * self.mins)


class SuperblockSearch:
    """The search for the scales of superblocks. Integer scales are from `low` to `high`."""

    def __init__(self, groups: GroupSums, low: int, high: int) -> None:
        self.groups, self.ops, self.low, self.high = groups, groups.ops, low, high

    def round_scales(
        self, scale: Array, minimum: Array | None, sums: LevelSums
    ) -> SuperblockScales:
        """Round scales and minimums [groups, blocks] to integers, such that the largest in a
        superblock becomes the largest integer. `sums` are the sums for the present levels.
        """
        ops = self.ops
        largest, smallest = ops.maximum(scale), ops.minimum(scale)
        d = ops.round_to_f16(
            ops.where(largest > -smallest, largest, smallest) / self.low
            if self.low
            else largest / self.high
        )
        scales = self._to_integers(scale * invert(d))
        if minimum is None:
            return self._refit(SuperblockScales(d, None, scales, None), sums)
        m = ops.round_to_f16(ops.maximum(-minimum) / self.high)
        return self._refit(
            SuperblockScales(d, m, scales, self._to_integers(-minimum * invert(m))), sums
        )

    def improve(self, scales: SuperblockScales, offsets: Sequence[int]) -> SuperblockScales:
        """Improve all superblocks once. First the nearest codes are computed, then the scales at
        the `offsets` around the present ones are tried, each with its nearest codes. Then the best
        integer scales for the codes are computed, and d and m are fitted.
        """
        groups, ops = self.groups, self.ops
        sums = groups.sums(scales.group_steps, scales.group_minimums)
        initial, error = scales, groups.error(scales.group_steps, scales.group_minimums, sums)
        for offset in offsets:
            new_scales = ops.clip(initial.scales + offset, self.low, self.high)
            offset_sums = groups.sums(initial.d * new_scales, initial.group_minimums)
            scales, error, sums = self._accept_better(scales, error, sums, new_scales, offset_sums)
        best, _ = groups.best_scales(sums)
        exact = best * invert(scales.d)
        first_integers = ops.round(exact - 0.5) if scales.m is not None else ops.round(exact)
        for offset in (0, 1) if scales.m is not None else (0,):
            new_scales = ops.clip(first_integers + offset, self.low, self.high)
            scales, error, sums = self._accept_better(scales, error, sums, new_scales, sums)
        return self._refit(scales, sums)

    def _accept_better(
        self,
        scales: SuperblockScales,
        error: Array,
        sums: LevelSums,
        new_scales: Array,
        new_sums: LevelSums,
    ) -> tuple[SuperblockScales, Array, LevelSums]:
        """Replace scales by `new_scales` in the groups where that lowers the error, each with its
        best minimum. `new_sums` are the sums for the levels of `new_scales`. Return the resulting
        scales, errors and sums.
        """
        ops, scale, mins = self.ops, scales.d * new_scales, None
        if scales.m is not None:
            exact = (scale * new_sums.levels - self.groups.product_sum) / self.groups.weight_sum
            mins = self._to_integers(exact * invert(scales.m))
        candidate = scales._replace(scales=new_scales, mins=mins)
        new_error = self.groups.error(scale, candidate.group_minimums, new_sums)
        is_better = new_error < error
        scales = scales._replace(
            scales=ops.where(is_better, new_scales, scales.scales),
            mins=None if mins is None else ops.where(is_better, mins, scales.mins),
        )
        return (
            scales,
            ops.where(is_better, new_error, error),
            sums if new_sums is sums else new_sums.where(ops, is_better, sums),
        )

    def _refit(self, scales: SuperblockScales, sums: LevelSums) -> SuperblockScales:
        """Return the scales with d and m fitted by least squares to all values, in the superblocks
        where that lowers the error.
        """
        ops, groups = self.ops, self.groups
        # Normal equations of x = d s - m t: s are scales times levels, t are mins, x are values.
        ss = ops.sum(scales.scales * scales.scales * sums.squares)
        sx = ops.sum(scales.scales * sums.products)
        if scales.m is None:
            candidate = scales._replace(d=ops.round_to_f16(sx * invert(ss)))
            valid = abs(candidate.d) > 0
        else:
            st = ops.sum(scales.scales * scales.mins * sums.levels)
            tt = ops.sum(scales.mins * scales.mins * groups.weight_sum)
            tx = ops.sum(scales.mins * groups.product_sum)
            inverse = invert(ss * tt - st * st)
            candidate = scales._replace(
                d=ops.round_to_f16((sx * tt - tx * st) * inverse),
                m=ops.round_to_f16((sx * st - tx * ss) * inverse),
            )
            valid = (candidate.d > 0) & (candidate.m >= 0)
        error = ops.sum(groups.error(scales.group_steps, scales.group_minimums, sums))
        better = valid & (
            ops.sum(groups.error(candidate.group_steps, candidate.group_minimums, sums)) < error
        )
        return scales._replace(
            d=ops.where(better, candidate.d, scales.d),
            m=None if scales.m is None else ops.where(better, candidate.m, scales.m),
        )

    def _to_integers(self, numbers: Array) -> Array:
        """Round to the nearest integers from `low` to `high`."""
        return self.ops.clip(self.ops.round(numbers), self.low, self.high)
