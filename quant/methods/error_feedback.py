"""Error feedback from column to column on a format's grid, followed by coordinate descent.

`round_with_feedback` works on a panel [columns, rows] of a weight's rows. Rows are independent, so
a panel may contain any of them. `factor` is the factorization of the second moments H = (I + F) D
(I + F)^T (hessian_factor.py). There are three steps; steps 1 and 2 are done block by block:

1. The block's target is its weights plus what F feeds in from the errors of earlier blocks. The
block's scales are searched for this target, with each column weighted by its D; they stay fixed in
step 2.
2. The block's columns are rounded one after another (`_round_block`). The error of each column is
fed into the columns after it.
3. In several sweeps over all blocks, each code moves to the level with the least total error while
all others stay fixed (coordinate descent; QuantEase, Behdin et al. 2309.01885). Then each group's
integer scale and minimum move in the same way, and the block's F16 numbers are fitted in closed
form, unless that increases the error of the row.
"""

from dataclasses import replace
from typing import TYPE_CHECKING

from quant.methods.column_grids import ColumnFormat, ColumnGrid, search_column_grid
from quant.methods.group_sums import invert
from quant.native.array_backends import Array, ArrayBackend

if TYPE_CHECKING:
    from quant.methods.hessian_factor import HessianFactor

FEED_COLUMNS = 32  # number of columns whose errors are fed into the rest of a block at a time


def round_with_feedback(
    kind: ColumnFormat, panel: Array, factor: "HessianFactor", sweeps: int, ops: ArrayBackend
) -> tuple[list[ColumnGrid], Array]:
    """Return the grids, one for each block, and the levels [columns, rows] for a panel [columns,
    rows].
    """
    errors, levels, grids = ops.zeros(*panel.shape), ops.empty_like(panel), []
    for first in range(0, len(panel), kind.block_columns):
        block = slice(first, first + kind.block_columns)
        target = panel[block] + factor.feed[block, :first] @ errors[:first]
        grid = search_column_grid(kind, target, factor.weights[block], ops)
        _round_block(
            grid, panel[block], target, factor.feed[block, block], levels[block], errors[block], ops
        )
        grids.append(grid)
    for _ in range(sweeps):
        for number, first in enumerate(range(0, len(panel), kind.block_columns)):
            block = slice(first, first + kind.block_columns)
            pull = factor.moments[block] @ errors
            within = factor.moments[block, block]
            _move_codes(grids[number], levels[block], pull, within, ops)
            grids[number] = _refit_scales(grids[number], levels[block], pull, within, ops)
            ops.subtract(panel[block], grids[number].value(levels[block]), out=errors[block])
    return grids, levels


def output_errors(errors: Array, factor: "HessianFactor", size: int) -> Array:
    """Return the error [rows] in the layer's output that errors [columns, rows] of the weights
    cause. `size` columns are processed at a time.
    """
    totals = 0 * errors[0]
    for first in range(0, len(errors), size):
        block, end = slice(first, first + size), first + size
        remaining = errors[block] + factor.feed[block, :end] @ errors[:end]
        totals += factor.weights[block] @ (remaining * remaining)
    return totals


def _round_block(
    grid: ColumnGrid,
    weights: Array,
    target: Array,
    feed: Array,
    found: Array,
    errors: Array,
    ops: ArrayBackend,
) -> None:
    """Round the columns of a block one after another, and write their levels into `found`.

    `errors` receives the errors of the block's `weights`. `target` is overwritten.
    """
    size, span, (low, high) = len(target), grid.format.group_columns, grid.format.bounds(ops)
    step, least = grid.steps()
    over, value = invert(step), ops.empty_like(target[0])
    for start in range(0, size, FEED_COLUMNS):
        end = min(start + FEED_COLUMNS, size)
        for column in range(start, end):
            group, code, wanted = column // span, found[column], target[column]
            if column > start:
                ops.add(wanted, feed[column, start:column] @ errors[start:column], out=wanted)
            if least is not None:
                ops.subtract(wanted, least[group], out=wanted)
            ops.multiply(wanted, over[group], out=wanted)
            ops.round(wanted, out=code)
            ops.clip_in_place(code, low, high)
            ops.multiply(code, step[group], out=value)
            if least is not None:
                ops.add(value, least[group], out=value)
            ops.subtract(weights[column], value, out=errors[column])
        if end < size:
            target[end:] += feed[end:, start:end] @ errors[start:end]


def _move_codes(grid: ColumnGrid, codes: Array, pull: Array, own: Array, ops: ArrayBackend) -> None:
    """Move each code of a block to the level with the least error. `own` is the block's part of H.
    `pull` [columns, rows] is H times the errors; it is updated.
    """
    size, span, (low, high) = len(codes), grid.format.group_columns, grid.format.bounds(ops)
    step, _ = grid.steps()
    over, steep = invert(step), ops.to_numpy(1 / own.diagonal()).tolist()
    new, moves = ops.empty_like(codes[0]), ops.empty_like(codes[:FEED_COLUMNS])
    for start in range(0, size, FEED_COLUMNS):
        end = min(start + FEED_COLUMNS, size)
        for column in range(start, end):
            group, move = column // span, moves[column - start]
            if column > start:
                ops.subtract(
                    pull[column], own[column, start:column] @ moves[: column - start], out=new
                )
                ops.multiply(new, over[group], out=new)
            else:
                ops.multiply(pull[column], over[group], out=new)
            ops.multiply(new, steep[column], out=new)
            ops.add(new, codes[column], out=new)
            ops.round(new, out=new)
            ops.clip_in_place(new, low, high)
            ops.subtract(new, codes[column], out=move)
            ops.multiply(move, step[group], out=move)
            codes[column] = new
        pull -= own[:, start:end] @ moves[: end - start]


def _refit_scales(
    grid: ColumnGrid, found: Array, pull: Array, own: Array, ops: ArrayBackend
) -> ColumnGrid:
    """Return the grid with scales fitted again to the same codes. `pull` is overwritten."""
    kind, rows = grid.format, found.shape[1]
    if grid.scales is not None:
        grid = _refit_groups(grid, found, pull, own, ops)
    scaled_codes = found
    if grid.scales is not None:
        scaled_codes = (
            found.reshape(kind.groups, kind.group_columns, rows) * grid.scales[:, None]
        ).reshape(found.shape)
    aa, ra = ops.dot(scaled_codes, own @ scaled_codes), ops.dot(scaled_codes, pull)
    if grid.m is None:
        new = ops.round_to_f16(grid.d + ra / aa)
        new = ops.where(aa > 0, new, grid.d)
        change = new - grid.d
        return replace(grid, d=ops.where(change * (change * aa - 2 * ra) < 0, new, grid.d))
    # A minimum has the same effect on all columns of a group.
    sums = own.reshape(kind.block_columns, kind.groups, kind.group_columns).sum(2)
    down = -grid.mins if grid.mins is not None else 1 + ops.zeros(1, rows)
    other = sums @ down
    ab, rb = ops.dot(scaled_codes, other), ops.dot(down, _group_totals(pull, kind))
    bb = ops.dot(down, _group_totals(other, kind))
    det = aa * bb - ab * ab
    sound = det > 1e-6 * aa * bb
    d_change, m_change = (ra * bb - rb * ab) / det, (rb * aa - ra * ab) / det
    d, m = (
        ops.where(sound, ops.round_to_f16(grid.d + d_change), grid.d),
        ops.where(sound, ops.round_to_f16(grid.m + m_change), grid.m),
    )
    x, y = d - grid.d, m - grid.m
    better = x * x * aa + 2 * x * y * ab + y * y * bb - 2 * (x * ra + y * rb) < 0
    return replace(grid, d=ops.where(better, d, grid.d), m=ops.where(better, m, grid.m))


def _group_totals(columns: Array, kind: ColumnFormat) -> Array:
    """Return sums [groups, rows] over the columns of each group."""
    return columns.reshape(kind.groups, kind.group_columns, -1).sum(1)


def _refit_groups(
    grid: ColumnGrid, found: Array, pull: Array, own: Array, ops: ArrayBackend
) -> ColumnGrid:
    """Return the grid with the integer scale and the minimum of each group, one after another,
    moved to their best values. `pull` is updated.
    """
    kind = grid.format
    assert kind.scale_range is not None
    low, high = kind.scale_range
    # copies, which are changed below
    scales, mins = grid.scales + 0, None if grid.mins is None else grid.mins + 0
    for group in range(kind.groups):
        part = slice(group * kind.group_columns, (group + 1) * kind.group_columns)
        codes, corner = found[part], own[part, part]
        steep = ops.dot(codes, corner @ codes) * grid.d
        wanted = ops.where(steep != 0, ops.dot(codes, pull[part]) / steep, 0 * steep)
        new = ops.clip(ops.round(scales[group] + wanted), low, high)
        moves = codes * ((new - scales[group]) * grid.d)
        scales[group] = new
        if mins is not None:
            assert kind.max_min is not None
            sums = corner.sum(1)
            remaining = pull[part].sum(0) - sums @ moves
            steep = grid.m * sums.sum()
            wanted = ops.where(steep != 0, remaining / steep, 0 * steep)
            new = ops.clip(ops.round(mins[group] - wanted), 0, kind.max_min)
            moves -= (new - mins[group]) * grid.m
            mins[group] = new
        pull -= own[:, part] @ moves
    return replace(grid, scales=scales, mins=mins)
