"""The integer scales and minimums of a superblock, chosen together with the codes.

ggml only rounds the scales. Here scales, minimums and codes are searched again with the rounded
scale of the scales: neighboring integers are tried, the best one for given codes is taken, and d
and dmin are fitted again to all values of a superblock. A change is accepted only if it lowers the
error.
"""

from collections.abc import Sequence
from typing import NamedTuple

from quant.methods.group_sums import Lanes, Sums, inverted
from quant.native.array_backends import Array


class Steps(NamedTuple):
    """The scales of superblocks: `d` and `m` [blocks] rounded to F16, `scales` and `mins` [groups,
    blocks] integers.

    m and mins are None where groups have no minimum.
    """

    d: Array
    m: Array
    scales: Array
    mins: Array

    @property
    def scale(self) -> Array:
        """Step size of each group."""
        return self.d * self.scales

    @property
    def least(self) -> Array:
        """Minimum of each group, None where groups have no minimum."""
        return None if self.m is None else -(self.m * self.mins)


class Superblocks:
    """The search for superblock scales with integers from `low` to `high`."""

    def __init__(self, lanes: Lanes, low: int, high: int) -> None:
        self.lanes, self.ops, self.low, self.high = lanes, lanes.ops, low, high

    def rounded(self, scale: Array, least: Array | None, sums: Sums) -> Steps:
        """Round scales and minimums [groups, blocks] to integers, so that the largest of a
        superblock becomes the largest integer.
        """
        ops = self.ops
        top, bottom = ops.most(scale), ops.least(scale)
        d = ops.half(
            ops.where(top > -bottom, top, bottom) / self.low if self.low else top / self.high
        )
        scales = self._to_integers(scale * inverted(d))
        if least is None:
            return self._refit(Steps(d, None, scales, None), sums)
        m = ops.half(ops.most(-least) / self.high)
        return self._refit(Steps(d, m, scales, self._to_integers(-least * inverted(m))), sums)

    def improved(self, steps: Steps, around: Sequence[int]) -> Steps:
        """Improve all superblocks once: new codes, the scales at the offsets `around` with their
        codes, the best scales for these codes, then d.
        """
        lanes, ops = self.lanes, self.ops
        sums = lanes.sums(steps.scale, steps.least)
        initial, error = steps, lanes.error(steps.scale, steps.least, sums)
        for offset in around:
            scales = ops.clip(initial.scales + offset, self.low, self.high)
            offset_sums = lanes.sums(initial.d * scales, initial.least)
            steps, error, sums = self._accept_better(steps, error, sums, scales, offset_sums)
        best, _ = lanes.best(sums)
        exact = best * inverted(steps.d)
        below = ops.round(exact - 0.5) if steps.m is not None else ops.round(exact)
        for offset in (0, 1) if steps.m is not None else (0,):
            scales = ops.clip(below + offset, self.low, self.high)
            steps, error, sums = self._accept_better(steps, error, sums, scales, sums)
        return self._refit(steps, sums)

    def _accept_better(
        self, steps: Steps, error: Array, sums: Sums, scales: Array, own: Sums
    ) -> tuple[Steps, Array, Sums]:
        """Return the steps with `scales` in the groups where they lower the error for their sums
        `own`, each with its best minimum.
        """
        ops, scale, mins = self.ops, steps.d * scales, None
        if steps.m is not None:
            exact = (scale * own.plain - self.lanes.along) / self.lanes.weight
            mins = self._to_integers(exact * inverted(steps.m))
        candidate = steps._replace(scales=scales, mins=mins)
        least = self.lanes.error(scale, candidate.least, own)
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

    def _refit(self, steps: Steps, sums: Sums) -> Steps:
        """Return the steps with d and m fitted by least squares to all values, in the superblocks
        where that lowers the error.
        """
        ops, lanes = self.ops, self.lanes
        square = ops.total(steps.scales * steps.scales * sums.square)
        along = ops.total(steps.scales * sums.along)
        if steps.m is None:
            candidate = steps._replace(d=ops.half(along * inverted(square)))
            valid = abs(candidate.d) > 0
        else:
            cross = ops.total(steps.scales * steps.mins * sums.plain)
            weight = ops.total(steps.mins * steps.mins * lanes.weight)
            down = ops.total(steps.mins * lanes.along)
            inverse = inverted(square * weight - cross * cross)
            candidate = steps._replace(
                d=ops.half((along * weight - down * cross) * inverse),
                m=ops.half((along * cross - down * square) * inverse),
            )
            valid = (candidate.d > 0) & (candidate.m >= 0)
        before = ops.total(lanes.error(steps.scale, steps.least, sums))
        better = valid & (ops.total(lanes.error(candidate.scale, candidate.least, sums)) < before)
        return steps._replace(
            d=ops.where(better, candidate.d, steps.d),
            m=None if steps.m is None else ops.where(better, candidate.m, steps.m),
        )

    def _to_integers(self, numbers: Array) -> Array:
        return self.ops.clip(self.ops.round(numbers), self.low, self.high)
