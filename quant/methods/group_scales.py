"""A scale, and a minimum where there is one, for each group by itself: several starts, each
improved a few times.

A start spreads the levels over the values of a group. Then codes and scale are improved in turn:
the nearest levels for a scale, the best scale for these levels.

Source: make_qkx3_quants and make_qx_quants of ggml/src/ggml-quants.c, which try three dozen starts
and improve none.
"""

from collections.abc import Sequence

from quant.methods.group_sums import LARGE, Lanes, Sums
from quant.native.array_backends import Array


def fitted(lanes: Lanes, starts: Sequence[float], rounds: int) -> tuple[Array, Array | None, Sums]:
    """Return the best scale and minimum of each group, and the sums of the levels they were
    computed from.

    A start is how often the range of all levels is spread over the values of a group: beyond 1 the
    outermost values are clipped. Where there is no minimum, a negative start swaps the ends of the
    range.
    """
    ops = lanes.ops
    span, least = _full_range(lanes)
    best: tuple[Array, ...] = ()
    for start in starts:
        scale, low = span / start, least
        for _ in range(rounds):
            sums = lanes.sums(scale, low)
            scale, low = lanes.best(sums)
        error = lanes.error(scale, low, sums)
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


def _full_range(lanes: Lanes) -> tuple[Array, Array | None]:
    """Return the scale and minimum that spread all levels over a group."""
    ops = lanes.ops
    low, high = ops.least(lanes.x), ops.most(lanes.x)
    if lanes.most is None:
        return ops.where(high > -low, high, low) / lanes.low, None
    low = ops.clip(low, -LARGE, lanes.most)
    return (high - low) / lanes.high, low
