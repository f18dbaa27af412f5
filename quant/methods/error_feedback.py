"""Error feedback from column to column on a format's grid, followed by coordinate descent. The grid
is the set of values that a block's scales allow.

`round_with_feedback` works on a panel [columns, rows] of a weight's rows. Rows are independent, so
that a panel may contain any rows. `factor` is the factorization of the second moments H = (I + F) D
(I + F)^T (hessian_factor.py). There are three steps; steps 1 and 2 are done for one block after
another:

1. The block's target is its weights plus the errors of earlier blocks, multiplied by F. The block's
scales are searched for this target, with each column weighted by its D. They stay fixed in step 2.
2. The block's columns are rounded one after another (`_round_block`). The error of each column,
multiplied by F, is added to the columns after it.
3. In several sweeps over all blocks, each code moves to the level with the lowest total error while
all other codes stay fixed (coordinate descent; QuantEase, Behdin et al. 2309.01885). Then each
group's integer scale and minimum move in the same way, and the block's F16 scales are fitted in
closed form, unless that increases the error of the row.

On a CPU the loops over the columns of a block run in our C code if it is built
(quant/native/error_feedback.c), because numpy's calls take longer than their arithmetic there.
"""

from dataclasses import replace
from typing import TYPE_CHECKING

from quant.methods.column_grids import ColumnFormat, ColumnGrid, search_column_grid
from quant.methods.group_sums import invert
from quant.native import feedback_kernels
from quant.native.array_backends import Array, ArrayBackend, NumpyBackend

if TYPE_CHECKING:
    from quant.methods.hessian_factor import HessianFactor

# Number of columns whose errors are added to the later columns of a block in one product.
FEED_COLUMNS = 32


def round_with_feedback(
    kind: ColumnFormat, panel: Array, factor: "HessianFactor", sweeps: int, ops: ArrayBackend
) -> tuple[list[ColumnGrid], Array, Array]:
    """Round a panel [columns, rows] of weights. Return the grids, one for each block of columns,
    the levels [columns, rows], and the error [rows] in the layer's output that they cause.

    `sweeps` is the number of sweeps of coordinate descent, at least one. The last one also adds up
    the error e H e^T: in it the errors of all columns before a block are final.
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
    row_errors = ops.zeros(panel.shape[1])
    for sweep in range(sweeps):
        for number, first in enumerate(range(0, len(panel), kind.block_columns)):
            block = slice(first, first + kind.block_columns)
            from_before = factor.moments[block, :first] @ errors[:first]
            gradient = from_before + factor.moments[block, first:] @ errors[first:]
            block_moments = factor.moments[block, block]
            _move_codes(grids[number], levels[block], gradient, block_moments, ops)
            grids[number] = _refit_scales(
                grids[number], levels[block], gradient, block_moments, ops
            )
            ops.subtract(panel[block], grids[number].value(levels[block]), out=errors[block])
            if sweep == sweeps - 1:
                doubled = 2 * from_before + block_moments @ errors[block]
                row_errors += ops.dot(errors[block], doubled)
    return grids, levels, row_errors


def output_errors(errors: Array, factor: "HessianFactor", size: int, limit: Array) -> Array:
    """Return the error [rows] in the layer's output that errors [columns, rows] of the weights
    cause. If it is above `limit` [rows] in every row, the result may be too small, but is also
    above `limit`. `size` columns are processed at a time.
    """
    totals = 0 * errors[0]
    for first in range(0, len(errors), size):
        block, end = slice(first, first + size), first + size
        combined = errors[block] + factor.feed[block, :end] @ errors[:end]
        totals += factor.weights[block] @ (combined * combined)
        if not (totals <= limit).any():
            break
    return totals


def _runs_in_c(grid: ColumnGrid, panel: Array, ops: ArrayBackend) -> bool:
    """Return whether our C code handles the columns of a block of this panel."""
    return (
        isinstance(ops, NumpyBackend)
        and grid.format.layout.fits(panel.shape[1])
        and feedback_kernels.is_installed()
    )


def _round_block(
    grid: ColumnGrid,
    weights: Array,
    target: Array,
    feed: Array,
    levels: Array,
    errors: Array,
    ops: ArrayBackend,
) -> None:
    """Round the columns of a block one after another.

    Levels are written into `levels`, and the errors of the block's `weights` into `errors`; both
    are [columns, rows]. `target` is overwritten. `feed` is the block's part of F transposed.
    """
    size, group_columns, (low, high) = (
        len(target),
        grid.format.group_columns,
        grid.format.bounds(ops),
    )
    step, minimum = grid.steps()
    if _runs_in_c(grid, levels, ops):
        step, minimum = ops.array(step), None if minimum is None else ops.array(minimum)
        feedback_kernels.round_block(
            grid.format.layout, weights, target, feed, step, minimum, levels, errors
        )
        return
    inverse_step, value = invert(step), ops.empty_like(target[0])
    for start in range(0, size, FEED_COLUMNS):
        end = min(start + FEED_COLUMNS, size)
        for column in range(start, end):
            group, level, target_level = column // group_columns, levels[column], target[column]
            if column > start:
                ops.add(
                    target_level,
                    feed[column, start:column] @ errors[start:column],
                    out=target_level,
                )
            if minimum is not None:
                ops.subtract(target_level, minimum[group], out=target_level)
            ops.multiply(target_level, inverse_step[group], out=target_level)
            ops.round(target_level, out=level)
            ops.clip_in_place(level, low, high)
            ops.multiply(level, step[group], out=value)
            if minimum is not None:
                ops.add(value, minimum[group], out=value)
            ops.subtract(weights[column], value, out=errors[column])
        if end < size:
            target[end:] += feed[end:, start:end] @ errors[start:end]


def _move_codes(
    grid: ColumnGrid, codes: Array, gradient: Array, block_moments: Array, ops: ArrayBackend
) -> None:
    """Move each code of a block to the level with the lowest error.

    `block_moments` is the block's part of H. `gradient` [columns, rows] is H times the errors, half
    the derivative of the total error; it is updated.
    """
    size, group_columns, (low, high) = (
        len(codes),
        grid.format.group_columns,
        grid.format.bounds(ops),
    )
    step, _ = grid.steps()
    if _runs_in_c(grid, codes, ops):
        feedback_kernels.move_codes(
            grid.format.layout, codes, gradient, block_moments, ops.array(step)
        )
        return
    inverse_step, inverse_diagonal = (
        invert(step),
        ops.to_numpy(1 / block_moments.diagonal()).tolist(),
    )
    new, moves = ops.empty_like(codes[0]), ops.empty_like(codes[:FEED_COLUMNS])
    for start in range(0, size, FEED_COLUMNS):
        end = min(start + FEED_COLUMNS, size)
        for column in range(start, end):
            group, move = column // group_columns, moves[column - start]
            if column > start:
                ops.subtract(
                    gradient[column],
                    block_moments[column, start:column] @ moves[: column - start],
                    out=new,
                )
                ops.multiply(new, inverse_step[group], out=new)
            else:
                ops.multiply(gradient[column], inverse_step[group], out=new)
            ops.multiply(new, inverse_diagonal[column], out=new)
            ops.add(new, codes[column], out=new)
            ops.round(new, out=new)
            ops.clip_in_place(new, low, high)
            ops.subtract(new, codes[column], out=move)
            ops.multiply(move, step[group], out=move)
            codes[column] = new
        gradient -= block_moments[:, start:end] @ moves[: end - start]


def _refit_scales(
    grid: ColumnGrid, codes: Array, gradient: Array, block_moments: Array, ops: ArrayBackend
) -> ColumnGrid:
    """Return the grid with scales and minimums fitted again to the same codes. `gradient` is
    overwritten.
    """
    kind, rows = grid.format, codes.shape[1]
    if grid.scales is not None:
        grid = _refit_groups(grid, codes, gradient, block_moments, ops)
    scaled_codes = codes
    if grid.scales is not None:
        scaled_codes = (
            codes.reshape(kind.groups, kind.group_columns, rows) * grid.scales[:, None]
        ).reshape(codes.shape)
    aa, ra = ops.dot(scaled_codes, block_moments @ scaled_codes), ops.dot(scaled_codes, gradient)
    if grid.m is None:
        new_d = ops.round_to_f16(grid.d + ra / aa)
        new_d = ops.where(aa > 0, new_d, grid.d)
        change = new_d - grid.d
        return replace(grid, d=ops.where(change * (change * aa - 2 * ra) < 0, new_d, grid.d))
    # A minimum changes all columns of a group by the same amount.
    sums = block_moments.reshape(kind.block_columns, kind.groups, kind.group_columns).sum(2)
    minimum_codes = -grid.mins if grid.mins is not None else 1 + ops.zeros(1, rows)
    minimum_gradients = sums @ minimum_codes
    ab, rb = (
        ops.dot(scaled_codes, minimum_gradients),
        ops.dot(minimum_codes, _group_totals(gradient, kind)),
    )
    bb = ops.dot(minimum_codes, _group_totals(minimum_gradients, kind))
    det = aa * bb - ab * ab
    is_solvable = det > 1e-6 * aa * bb
    d_change, m_change = (ra * bb - rb * ab) / det, (rb * aa - ra * ab) / det
    d, m = (
        ops.where(is_solvable, ops.round_to_f16(grid.d + d_change), grid.d),
        ops.where(is_solvable, ops.round_to_f16(grid.m + m_change), grid.m),
    )
    d_step, m_step = d - grid.d, m - grid.m
    better = (
        d_step * d_step * aa
        + 2 * d_step * m_step * ab
        + m_step * m_step * bb
        - 2 * (d_step * ra + m_step * rb)
        < 0
    )
    return replace(grid, d=ops.where(better, d, grid.d), m=ops.where(better, m, grid.m))


def _group_totals(columns: Array, kind: ColumnFormat) -> Array:
    """Return the sums [groups, rows] over the columns of each group."""
    return columns.reshape(kind.groups, kind.group_columns, -1).sum(1)


def _refit_groups(
    grid: ColumnGrid, codes: Array, gradient: Array, block_moments: Array, ops: ArrayBackend
) -> ColumnGrid:
    """Return the grid with each group's integer scale and minimum, one after another, moved to the
    best integer. `gradient` is updated.
    """
    kind = grid.format
    assert kind.scale_range is not None
    low, high = kind.scale_range
    # copies, which are changed below
    scales, mins = grid.scales + 0, None if grid.mins is None else grid.mins + 0
    if _runs_in_c(grid, codes, ops):
        scales, mins = ops.array(scales), None if mins is None else ops.array(mins)
        feedback_kernels.refit_groups(
            kind.layout,
            codes,
            gradient,
            block_moments,
            (grid.d, scales),
            None if mins is None else (grid.m, mins),
        )
        return replace(grid, scales=scales, mins=mins)
    for group in range(kind.groups):
        columns = slice(group * kind.group_columns, (group + 1) * kind.group_columns)
        group_codes, group_moments = codes[columns], block_moments[columns, columns]
        curvature = ops.dot(group_codes, group_moments @ group_codes) * grid.d
        step = ops.where(
            curvature != 0, ops.dot(group_codes, gradient[columns]) / curvature, 0 * curvature
        )
        new = ops.clip(ops.round(scales[group] + step), low, high)
        moves = group_codes * ((new - scales[group]) * grid.d)
        scales[group] = new
        if mins is not None:
            assert kind.max_min is not None
            sums = group_moments.sum(1)
            remaining = gradient[columns].sum(0) - sums @ moves
            curvature = grid.m * sums.sum()
            step = ops.where(curvature != 0, remaining / curvature, 0 * curvature)
            new = ops.clip(ops.round(mins[group] - step), 0, kind.max_min)
            moves -= (new - mins[group]) * grid.m
            mins[group] = new
        gradient -= block_moments[:, columns] @ moves
    return replace(grid, scales=scales, mins=mins)
