"""The search for the integer scales and minimums of a superblock, together with the codes.

ggml only rounds the scales. Here scales, minimums and codes are searched again with the
superblock's F16 scale as it is rounded: neighboring integers are tried, the best integer for given
codes is taken, and d and m are fitted again to all values of the superblock. A change is accepted
only if it lowers the error.
"""

from collections.abc import Sequence
from typing import NamedTuple

from quant.methods.group_sums import GroupSums, LevelSums, invert
from quant.native.array_backends import Array


class SuperblockScales(NamedTuple):
    """The scales of superblocks: `d` and `m` [blocks] are rounded to F16, `scales` and `mins`
    [groups, blocks] are integers.

    `m` and `mins` are None if groups have no minimum.
    """

    d: Array
    m: Array
    scales: Array
    mins: Array

    @property
    def group_steps(self) -> Array:
        """Step size of each group."""
        return self.d * self.scales

    @property
    def group_minimums(self) -> Array:
        """Minimum of each group, None if groups have no minimum."""
        return None if self.m is None else -(self.m * self.mins)


class SuperblockSearch:
    """The search for the scales of superblocks, with integers from `low` to `high`."""

    def __init__(self, lanes: GroupSums, low: int, high: int) -> None:
        self.groups, self.ops, self.low, self.high = lanes, lanes.ops, low, high

    def round_scales(self, scale: Array, least: Array | None, sums: LevelSums) -> SuperblockScales:
        """Round scales and minimums [groups, blocks] to integers, such that the largest in a
        superblock becomes the largest integer.
        """
        ops = self.ops
        top, bottom = ops.maximum(scale), ops.minimum(scale)
        d = ops.round_to_f16(
            ops.where(top > -bottom, top, bottom) / self.low if self.low else top / self.high
        )
        scales = self._to_integers(scale * invert(d))
        if least is None:
            return self._refit(SuperblockScales(d, None, scales, None), sums)
        m = ops.round_to_f16(ops.maximum(-least) / self.high)
        return self._refit(
            SuperblockScales(d, m, scales, self._to_integers(-least * invert(m))), sums
        )

    def improve(self, steps: SuperblockScales, around: Sequence[int]) -> SuperblockScales:
        """Improve all superblocks once: take the nearest codes, then try the scales at the offsets
        `around`, each with its nearest codes, then the best scales for the codes, then fit d and m.
        """
        lanes, ops = self.groups, self.ops
        sums = lanes.sums(steps.group_steps, steps.group_minimums)
        initial, error = steps, lanes.error(steps.group_steps, steps.group_minimums, sums)
        for offset in around:
            scales = ops.clip(initial.scales + offset, self.low, self.high)
            offset_sums = lanes.sums(initial.d * scales, initial.group_minimums)
            steps, error, sums = self._accept_better(steps, error, sums, scales, offset_sums)
        best, _ = lanes.best_scales(sums)
        exact = best * invert(steps.d)
        below = ops.round(exact - 0.5) if steps.m is not None else ops.round(exact)
        for offset in (0, 1) if steps.m is not None else (0,):
            scales = ops.clip(below + offset, self.low, self.high)
            steps, error, sums = self._accept_better(steps, error, sums, scales, sums)
        return self._refit(steps, sums)

    def _accept_better(
        self, steps: SuperblockScales, error: Array, sums: LevelSums, scales: Array, own: LevelSums
    ) -> tuple[SuperblockScales, Array, LevelSums]:
        """Take `scales` in the groups where they lower the error, each with its best minimum; `own`
        are the sums for their codes. Return the resulting scales, errors and sums.
        """
        ops, scale, mins = self.ops, steps.d * scales, None
        if steps.m is not None:
            exact = (scale * own.levels - self.groups.product_sum) / self.groups.weight_sum
            mins = self._to_integers(exact * invert(steps.m))
        candidate = steps._replace(scales=scales, mins=mins)
        least = self.groups.error(scale, candidate.group_minimums, own)
        which = least < error
        steps = steps._replace(
            scales=ops.where(which, scales, steps.scales),
            mins=None if mins is None else ops.where(which, mins, steps.mins),
        )
        return (
            steps,
            ops.where(which, least, error),
            sums if own is sums else own.where(ops, which, sums),
        )

    def _refit(self, steps: SuperblockScales, sums: LevelSums) -> SuperblockScales:
        """Return the steps with d and m fitted by least squares to all values, in the superblocks
        where that lowers the error.
        """
        ops, lanes = self.ops, self.groups
        square = ops.sum(steps.scales * steps.scales * sums.squares)
        along = ops.sum(steps.scales * sums.products)
        if steps.m is None:
            candidate = steps._replace(d=ops.round_to_f16(along * invert(square)))
            valid = abs(candidate.d) > 0
        else:
            cross = ops.sum(steps.scales * steps.mins * sums.levels)
            weight = ops.sum(steps.mins * steps.mins * lanes.weight_sum)
            down = ops.sum(steps.mins * lanes.product_sum)
            inverse = invert(square * weight - cross * cross)
            candidate = steps._replace(
                d=ops.round_to_f16((along * weight - down * cross) * inverse),
                m=ops.round_to_f16((along * cross - down * square) * inverse),
            )
            valid = (candidate.d > 0) & (candidate.m >= 0)
        before = ops.sum(lanes.error(steps.group_steps, steps.group_minimums, sums))
        better = valid & (
            ops.sum(lanes.error(candidate.group_steps, candidate.group_minimums, sums)) < before
        )
        return steps._replace(
            d=ops.where(better, candidate.d, steps.d),
            m=None if steps.m is None else ops.where(better, candidate.m, steps.m),
        )

    def _to_integers(self, numbers: Array) -> Array:
        return self.ops.clip(self.ops.round(numbers), self.low, self.high)
