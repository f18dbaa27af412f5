"""Search for the scale, and the minimum if the format has one, of each group by itself: several
starts are each improved a few times.

A start spreads the levels over the values of a group. Then codes and scale are improved in turn:
the nearest levels for the scale, then the best scale for these levels.

Source: make_qkx3_quants and make_qx_quants of ggml/src/ggml-quants.c, which try about 36 starts and
do not improve them.
"""

from collections.abc import Sequence

from quant.methods.group_sums import LARGEST_F32, GroupSums, LevelSums
from quant.native.array_backends import Array


def fit_group_scales(
    groups: GroupSums, starts: Sequence[float], rounds: int
) -> tuple[Array, Array | None, LevelSums]:
    """Return the best scale and minimum of each group, and the sums over the levels that they were
    computed from.

    The first scale of a start is the scale with which all levels just cover the group's values,
    divided by the start. With a start above 1 the outermost values are clipped. In formats without
    a minimum, a negative start swaps the two ends of the levels' range.
    """
    ops = groups.ops
    span, least = _full_range(groups)
    best: tuple[Array, ...] = ()
    for start in starts:
        scale, low = span / start, least
        for _ in range(rounds):
            sums = groups.sums(scale, low)
            scale, low = groups.best_scales(sums)
        error = groups.error(scale, low, sums)
        if not best:
            best = (error, scale, low, sums)
            continue
        better = error < best[0]
        best = (
            ops.where(better, error, best[0]),
            ops.where(better, scale, best[1]),
            None if low is None else ops.where(better, low, best[2]),
            sums.where(ops, better, best[3]),
        )
    return best[1], best[2], best[3]


def _full_range(lanes: GroupSums) -> tuple[Array, Array | None]:
    """Return the scale and the minimum with which all levels just cover the values of a group."""
    ops = lanes.ops
    low, high = ops.minimum(lanes.x), ops.maximum(lanes.x)
    if lanes.max_minimum is None:
        return ops.where(high > -low, high, low) / lanes.low, None
    low = ops.clip(low, -LARGEST_F32, lanes.max_minimum)
    return (high - low) / lanes.high, low
