"""Search for the scale, and the minimum if the format has one, of each group on its own. Several
first guesses (starts) are each improved a few times.

A start spreads the levels over the values of a group. Then codes and scale are improved in turn:
first the nearest levels for the scale are computed, then the best scale for these levels.

Source: make_qkx3_quants and make_qx_quants of ggml/src/ggml-quants.c, which try about 36 starts and
do not improve them.
"""

from collections.abc import Sequence

from quant.methods.group_sums import LARGEST_F32, GroupSums, LevelSums
from quant.native.array_backends import Array


def fit_group_scales(
    groups: GroupSums, starts: Sequence[float], rounds: int
) -> tuple[Array, Array | None, LevelSums]:
    """Return the best scale and minimum of each group [groups of a block, blocks], and the sums
    over the levels from which they were computed. The minimum is None in formats without minimums.

    The first scale of a start is the scale with which all levels just cover the group's values,
    divided by the start. A start above 1 clips the outermost values. In formats without minimums, a
    negative start swaps the two ends of the levels' range.
    """
    ops = groups.ops
    full_scale, full_minimum = _full_range(groups)
    best: tuple[Array, ...] = ()
    for start in starts:
        scale, minimum = full_scale / start, full_minimum
        for _ in range(rounds):
            sums = groups.sums(scale, minimum)
            scale, minimum = groups.best_scales(sums)
        error = groups.error(scale, minimum, sums)
        if not best:
            best = (error, scale, minimum, sums)
            continue
        better = error < best[0]
        best = (
            ops.where(better, error, best[0]),
            ops.where(better, scale, best[1]),
            None if minimum is None else ops.where(better, minimum, best[2]),
            sums.where(ops, better, best[3]),
        )
    return best[1], best[2], best[3]


def _full_range(groups: GroupSums) -> tuple[Array, Array | None]:
    """Return the scale and the minimum (or None) with which all levels just cover the values of a
    group.
    """
    ops = groups.ops
    low, high = ops.minimum(groups.x), ops.maximum(groups.x)
    if groups.max_minimum is None:
        return ops.where(high > -low, high, low) / groups.low, None
    low = ops.clip(low, -LARGEST_F32, groups.max_minimum)
    return (high - low) / groups.high, low
