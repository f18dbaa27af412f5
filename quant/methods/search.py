"""`--method search`: scales, minimums and codes chosen together, by what the imatrix says of each column.

All groups of a chunk are searched at once (lanes.py), each by itself first (scales.py), then with its superblock
(superblocks.py); on a GPU where torch has one, else by numpy. The same rows give the same bytes however they are cut.
"""

from typing import TYPE_CHECKING

from quant import native
from quant.accelerate import device, operations
from quant.formats.base import Fields, Linear
from quant.methods.base import Evidence, Method, Solver
from quant.methods.grids import GRIDS, Grid
from quant.methods.lanes import Lanes
from quant.methods.scales import fitted
from quant.methods.superblocks import Steps, Superblocks

if TYPE_CHECKING:
    from quant.accelerate import Array, Ops
    from quant.formats.base import Floats, Format, Ints
    from quant.native import F32, U8

FULL = 16  # a chunk is filled up to whole so many blocks: sums then run alike, whatever its size
ON_DEVICE = 1 << 22  # values that a GPU has at a time


class Search(Method):
    """The k-quants and the types with one scale a block; what has a code book is ggml's."""

    name, help, needs = "search", "scales and codes chosen together: less error than ggml", "sums"

    @property
    def chunk(self) -> int:  # type: ignore[override]
        """As much as stays in a core's cache, or as fills a GPU."""
        return ON_DEVICE if device() else 0

    def handles(self, format: "Format", evidence: Evidence) -> bool:
        """Whether its levels are evenly spaced."""
        return format.name in GRIDS

    def solver(self, format: "Format", evidence: Evidence) -> Solver:
        """The search for the format; rows that it cannot hold are refused as ggml's encoder refuses them."""
        assert isinstance(format, Linear)
        grid, ops = GRIDS[format.name], operations(device())

        def solve(rows: "F32", first: int) -> "U8":
            importance = evidence.weigh(first, first + len(rows))
            native.check_rows(rows, format.name, label=evidence.name, importance=importance)
            fields = searched(rows, grid.weights(rows, importance), format, grid, ops)
            made = format.pack(fields).reshape(len(rows), -1)
            native.check_made(made, format.name, label=evidence.name)
            return made

        return solve


def searched(rows: "F32", weights: "F32", format: Linear, grid: Grid, ops: "Ops") -> Fields:
    """The fields of the blocks of rows [rows, columns], each value weighed by `weights` of the same shape."""
    import numpy as np

    count = rows.size // grid.values
    x, w = (_beside(values, grid, ops) for values in (rows, weights))
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):  # what gets infinite is refused by check_made
        lanes = Lanes(ops, x, w, format.low - format.zero, format.high - format.zero, grid.most)
        scale, least, sums = fitted(lanes, grid.starts, grid.rounds)
        if grid.whole is None:
            steps = Steps(ops.half(scale)[0], None if least is None else ops.half(least)[0], None, None)
            levels = lanes.levels(steps.d[None], None if least is None else steps.m[None])
        else:
            search = Superblocks(lanes, *grid.whole)
            steps = search.rounded(scale, least, sums)
            for around in grid.around:
                steps = search.improved(steps, around)
            levels = lanes.levels(steps.scale, steps.least)
        return _fields(levels, steps, format, count, ops)


def _beside(values: "F32", grid: Grid, ops: "Ops") -> "Array":
    """Blocks one behind the other -> [values of a group, groups of a block, blocks], filled up with zeros."""
    import numpy as np

    blocks = values.reshape(-1, grid.groups, grid.values // grid.groups)
    turned = np.zeros((*blocks.shape[:0:-1], -(-len(blocks) // FULL) * FULL), np.float32)
    turned[:, :, : len(blocks)] = blocks.transpose(2, 1, 0)
    return ops.array(turned)


def _fields(levels: "Array", steps: Steps, format: Linear, count: int, ops: "Ops") -> Fields:
    """As the format knows them, without what was filled up."""
    import numpy as np

    found = ops.numpy(levels)
    codes = np.empty((count, *found.shape[1::-1]), np.int16)
    np.copyto(codes, found[:, :, :count].transpose(2, 1, 0), casting="unsafe")
    codes += format.zero

    def halves(values: "Array") -> "Floats":
        return ops.numpy(values)[:count].astype(np.float16)

    def whole(values: "Array") -> "Ints":
        return ops.numpy(values)[:, :count].T.astype(np.int16)

    return Fields(
        codes.reshape(count, -1), halves(steps.d), None if steps.m is None else halves(steps.m),
        None if steps.scales is None else whole(steps.scales), None if steps.mins is None else whole(steps.mins),
    )  # fmt: skip


METHODS = (Search(),)
