"""The whole numbers that a superblock's scales and minimums become, chosen together with the codes.

ggml rounds the scales and is done. Here scales, minimums and codes are looked over again with the
scale of the scales as the file will hold it: neighbouring whole numbers are tried, the best for
given codes taken, and d and dmin fitted anew to all values of a superblock. No step is taken that
the error does not reward.
"""

from collections.abc import Sequence
from typing import NamedTuple

from quant.accelerate import Array
from quant.methods.lanes import Lanes, Sums, inverted


class Steps(NamedTuple):
    """Of superblocks: `d` and `m` [blocks] as an F16 holds them, `scales` and `mins` [groups,
    blocks] whole numbers.

    m and mins are None where groups have no minimum.
    """

    d: Array
    m: Array
    scales: Array
    mins: Array

    @property
    def scale(self) -> Array:
        """The size of a step in each group."""
        return self.d * self.scales

    @property
    def least(self) -> Array:
        """What is added in each group."""
        return None if self.m is None else -(self.m * self.mins)


class Superblocks:
    """The search for the Steps of `lanes` with whole numbers from `low` to `high`."""

    def __init__(self, lanes: Lanes, low: int, high: int) -> None:
        self.lanes, self.ops, self.low, self.high = lanes, lanes.ops, low, high

    def rounded(self, scale: Array, least: Array | None, sums: Sums) -> Steps:
        """Scales and minimums [groups, blocks] as whole numbers, the largest of a superblock as the
        largest.
        """
        ops = self.ops
        top, bottom = ops.most(scale), ops.least(scale)
        d = ops.half(
            ops.where(top > -bottom, top, bottom) / self.low if self.low else top / self.high
        )
        scales = self._whole(scale * inverted(d))
        if least is None:
            return self._refitted(Steps(d, None, scales, None), sums)
        m = ops.half(ops.most(-least) / self.high)
        return self._refitted(Steps(d, m, scales, self._whole(-least * inverted(m))), sums)

    def improved(self, steps: Steps, around: Sequence[int]) -> Steps:
        """One look over all: codes anew, the scales `around` with codes of their own, the best for
        these codes, d.
        """
        lanes, ops = self.lanes, self.ops
        sums = lanes.sums(steps.scale, steps.least)
        begun, error = steps, lanes.error(steps.scale, steps.least, sums)
        for offset in around:
            scales = ops.clip(begun.scales + offset, self.low, self.high)
            own = lanes.sums(begun.d * scales, begun.least)
            steps, error, sums = self._better(steps, error, sums, scales, own)
        best, _ = lanes.best(sums)
        turned = best * inverted(steps.d)
        below = ops.round(turned - 0.5) if steps.m is not None else ops.round(turned)
        for offset in (0, 1) if steps.m is not None else (0,):
            scales = ops.clip(below + offset, self.low, self.high)
            steps, error, sums = self._better(steps, error, sums, scales, sums)
        return self._refitted(steps, sums)

    def _better(
        self, steps: Steps, error: Array, sums: Sums, scales: Array, own: Sums
    ) -> tuple[Steps, Array, Sums]:
        """With `scales` in those groups where they lower the error for their sums `own`, each with
        its best minimum.
        """
        ops, scale, mins = self.ops, steps.d * scales, None
        if steps.m is not None:
            wanted = (scale * own.plain - self.lanes.along) / self.lanes.weight
            mins = self._whole(wanted * inverted(steps.m))
        tried = steps._replace(scales=scales, mins=mins)
        least = self.lanes.error(scale, tried.least, own)
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

    def _refitted(self, steps: Steps, sums: Sums) -> Steps:
        """d and m anew, in the superblocks where that lowers the error: least squares over all of
        their values.
        """
        ops, lanes = self.ops, self.lanes
        square = ops.total(steps.scales * steps.scales * sums.square)
        along = ops.total(steps.scales * sums.along)
        if steps.m is None:
            tried = steps._replace(d=ops.half(along * inverted(square)))
            sound = abs(tried.d) > 0
        else:
            cross = ops.total(steps.scales * steps.mins * sums.plain)
            weight = ops.total(steps.mins * steps.mins * lanes.weight)
            down = ops.total(steps.mins * lanes.along)
            inverse = inverted(square * weight - cross * cross)
            tried = steps._replace(
                d=ops.half((along * weight - down * cross) * inverse),
                m=ops.half((along * cross - down * square) * inverse),
            )
            sound = (tried.d > 0) & (tried.m >= 0)
        before = ops.total(lanes.error(steps.scale, steps.least, sums))
        better = sound & (ops.total(lanes.error(tried.scale, tried.least, sums)) < before)
        return steps._replace(
            d=ops.where(better, tried.d, steps.d),
            m=None if steps.m is None else ops.where(better, tried.m, steps.m),
        )

    def _whole(self, numbers: Array) -> Array:
        return self.ops.clip(self.ops.round(numbers), self.low, self.high)
