"""`--method search`: scales, minimums and codes chosen together, weighted by the imatrix.

All groups of a chunk are searched at once (group_sums.py), first each by itself (group_scales.py),
then with its superblock (superblock_scales.py): on a GPU if torch has one, else by our C code if it
is built (quant/native/searches.c), else by numpy, the reference. The same rows give the same bytes
however they are split; another machine may give other bytes.
"""

from typing import TYPE_CHECKING

from quant.calibration.statistics import Evidence
from quant.formats.base import Fields, Linear
from quant.methods.base import Method, Solver
from quant.methods.group_scales import fitted
from quant.methods.group_sums import Lanes, inverted
from quant.methods.search_settings import GRIDS, Effort, Grid
from quant.methods.superblock_scales import Steps, Superblocks
from quant.native import array_backends, ggml

if TYPE_CHECKING:
    from quant.formats.base import Floats, Format, Ints
    from quant.native.array_backends import Array, Ops
    from quant.native.ggml import F32, U8

# a chunk is padded to a multiple of so many blocks, so that sums do not depend on its size
FULL = 16
ON_DEVICE, IN_C = 1 << 22, 1 << 17  # values in a chunk on a GPU, and in our C code


class Search(Method):
    """The k-quants and the types with one scale per block; types with a codebook are left to
    ggml.
    """

    name, help, needs = "search", "scales and codes chosen together: less error than ggml", "sums"

    def values(self, evidence: Evidence) -> int:
        """Return as many values as fit a core's cache, or fill a GPU."""
        return ON_DEVICE if array_backends.device() else IN_C if ggml.searches() else 0

    def handles(self, format: "Format", evidence: Evidence) -> bool:
        """Return whether the format's levels are evenly spaced."""
        return format.name in GRIDS

    def means(self) -> str:
        """Return the GPU's name, "C" or "numpy": each adds in a different order."""
        return array_backends.device() or ("C" if ggml.searches() else "numpy")

    def solver(self, format: "Format", evidence: Evidence) -> Solver:
        """Return the encoder for the format. It raises UserError for rows that the format cannot
        hold, as ggml's encoder does.
        """
        assert isinstance(format, Linear)
        grid, weigh = GRIDS[format.name], evidence.weigher()
        search = (
            _search_in_c
            if array_backends.device() is None and ggml.searches()
            else _search_in_arrays
        )

        def solve(rows: "F32", first: int) -> "U8":
            importance = weigh(first, first + len(rows))
            ggml.check_rows(rows, format.name, label=evidence.name, importance=importance)
            blocks = search(rows, importance, format, grid).reshape(len(rows), -1)
            ggml.check_made(blocks, format.name, label=evidence.name)
            return blocks

        return (
            solve
            if array_backends.device() is None
            else array_backends.halved(solve, evidence.name)
        )


def _search_in_arrays(
    rows: "F32", importance: ggml.Importance | None, format: Linear, grid: Grid
) -> "U8":
    """Search on a GPU, or in numpy with less effort."""
    effort = grid.long if array_backends.device() else grid.brief
    ops = array_backends.operations(array_backends.device())
    with ops.alone():
        fields = searched(rows, importance, format, grid, ops, effort)
    return format.pack(fields)


def _search_in_c(
    rows: "F32", importance: ggml.Importance | None, format: Linear, grid: Grid
) -> "U8":
    """Search in C, with each matrix's own importance."""
    import numpy as np

    settings = asking(
        grid, format.low - format.zero, format.high - format.zero, grid.spread_with(importance)
    )
    even = np.ones(rows.shape[1], np.float32)
    spans = importance.spans(0, len(rows)) if importance else ((0, len(rows), even),)
    pieces = [
        packed(ggml.search(rows[first:last], grid.even(vector), settings), format, grid)
        for first, last, vector in spans
    ]
    return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)


def asking(grid: Grid, low: int, high: int, spread: float) -> ggml.Searching:
    """Return the settings with which our C code searches a grid with levels from `low` to
    `high`.
    """
    effort = grid.long
    return ggml.Searching(
        grid.values // grid.groups,
        grid.groups,
        (low, high),
        grid.most,
        grid.whole,
        spread,
        effort.starts,
        effort.rounds,
        effort.around,
    )


def packed(found: ggml.Found, format: Linear, grid: Grid) -> "U8":
    """Return the search result as blocks, packed by our C code if it is built."""
    import numpy as np

    if (blocks := ggml.packed(found, format.name)) is not None:
        return blocks
    # native.check_made refuses infinite scales
    with np.errstate(over="ignore", invalid="ignore"):
        d, m = found.d.astype(np.float16), found.m.astype(np.float16)
    whole = grid.whole is not None
    return format.pack(
        Fields(
            found.levels + np.int16(format.zero),
            d,
            m if grid.most is not None else None,
            found.scales if whole else None,
            found.mins if whole and grid.most is not None else None,
        )
    )


def searched(
    rows: "F32",
    importance: ggml.Importance | None,
    format: Linear,
    grid: Grid,
    ops: "Ops",
    effort: Effort,
) -> Fields:
    """Return the fields of the blocks of rows [rows, columns], each column weighted by
    `importance`.
    """
    import numpy as np

    count = rows.size // grid.values
    x = _padded(rows.reshape(-1, grid.groups, grid.values // grid.groups).transpose(2, 1, 0), ops)
    w = _padded(grid.columns(importance, *rows.shape).reshape(*x.shape[:2], -1), ops)
    # native.check_made refuses infinite scales
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        if spread := grid.spread_with(importance):
            _weigh_large_values(x, w, spread, ops)
        lanes, steps = stepped(
            x, w, grid, (format.low - format.zero, format.high - format.zero), ops, effort
        )
        if grid.whole is None:
            levels = lanes.levels(steps.d[None], None if steps.m is None else steps.m[None])
        else:
            levels = lanes.levels(steps.scale, steps.least)
        return _to_fields(levels, steps, format, count, ops)


def stepped(
    x: "Array", w: "Array", grid: Grid, levels: tuple[int, int], ops: "Ops", effort: Effort
) -> tuple[Lanes, Steps]:
    """Search scales and minimums for values [values of a group, groups of a block, blocks], with
    weights of the same shape and levels from the lowest to the highest.
    """
    lanes = Lanes(ops, x, w, *levels, grid.most)
    scale, least, sums = fitted(lanes, effort.starts, effort.rounds)
    if grid.whole is None:
        return lanes, Steps(
            ops.half(scale)[0], None if least is None else ops.half(least)[0], None, None
        )
    search = Superblocks(lanes, *grid.whole)
    steps = search.rounded(scale, least, sums)
    for around in effort.around:
        steps = search.improved(steps, around)
    return lanes, steps


def _padded(values: "F32", ops: "Ops") -> "Array":
    """Return the values [values of a group, groups of a block, blocks] as a contiguous array,
    padded with blocks of ones to a multiple of CHUNK_BLOCKS.
    """
    import numpy as np

    count = values.shape[2]
    if count % FULL == 0:
        return ops.array(values)
    padded = np.ones((*values.shape[:2], -(-count // FULL) * FULL), np.float32)
    padded[:, :, :count] = values
    return ops.array(padded)


def _weigh_large_values(x: "Array", w: "Array", spread: float, ops: "Ops") -> None:
    """Increase the weight of large values: multiply weights by sqrt(spread + x² / mean of x² in the
    block).
    """
    mean = ops.total(ops.dot(x, x)) / (x.shape[0] * x.shape[1])
    root = x * inverted(ops.sqrt(mean))
    ops.multiply(root, root, out=root)
    ops.add(root, spread, out=root)
    ops.multiply(w, ops.sqrt(root, out=root), out=w)


def _to_fields(levels: "Array", steps: Steps, format: Linear, count: int, ops: "Ops") -> Fields:
    """Return the levels and steps as the format's fields, without padding."""
    import numpy as np

    numbers = ops.numpy(levels)
    codes = np.empty((count, *numbers.shape[1::-1]), np.int16)
    np.copyto(codes, numbers[:, :, :count].transpose(2, 1, 0), casting="unsafe")
    codes += format.zero

    def halves(values: "Array") -> "Floats":
        return ops.numpy(values)[:count].astype(np.float16)

    def whole(values: "Array") -> "Ints":
        return ops.numpy(values)[:, :count].T.astype(np.int16)

    return Fields(
        codes.reshape(count, -1),
        halves(steps.d),
        None if steps.m is None else halves(steps.m),
        None if steps.scales is None else whole(steps.scales),
        None if steps.mins is None else whole(steps.mins),
    )


METHODS = (Search(),)
