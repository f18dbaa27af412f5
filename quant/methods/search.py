"""`--method search`: scales, minimums and codes chosen together, by what the imatrix says of each
column.

All groups of a chunk are searched at once (lanes.py), each by itself first (scales.py), then with
its superblock (superblocks.py): on a GPU where torch has one, else by our C where the build has it
(quant/searches.c), else by numpy, which is the truth. The same rows give the same bytes however
they are cut; those of another machine may differ.
"""

from typing import TYPE_CHECKING

from quant import accelerate, native
from quant.formats.base import Fields, Linear
from quant.methods.base import Evidence, Method, Solver
from quant.methods.grids import GRIDS, Effort, Grid
from quant.methods.lanes import Lanes, inverted
from quant.methods.scales import fitted
from quant.methods.superblocks import Steps, Superblocks

if TYPE_CHECKING:
    from quant.accelerate import Array, Ops
    from quant.formats.base import Floats, Format, Ints
    from quant.native import F32, U8

FULL = 16  # a chunk is filled up to whole so many blocks: sums then run alike, whatever its size
ON_DEVICE, IN_C = 1 << 22, 1 << 17  # values that a GPU has at a time, and our C


class Search(Method):
    """The k-quants and the types with one scale a block; what has a code book is ggml's."""

    name, help, needs = "search", "scales and codes chosen together: less error than ggml", "sums"

    def values(self, evidence: Evidence) -> int:
        """As much as stays in a core's cache, or as fills a GPU."""
        return ON_DEVICE if accelerate.device() else IN_C if native.searches() else 0

    def handles(self, format: "Format", evidence: Evidence) -> bool:
        """Whether its levels are evenly spaced."""
        return format.name in GRIDS

    def means(self) -> str:
        """A GPU, our C, or numpy: each adds up in an order of its own."""
        return accelerate.device() or ("C" if native.searches() else "numpy")

    def solver(self, format: "Format", evidence: Evidence) -> Solver:
        """The search for the format; rows that it cannot hold are refused as ggml's encoder refuses
        them.
        """
        assert isinstance(format, Linear)
        grid, weigh = GRIDS[format.name], evidence.weigher()
        search = _in_c if accelerate.device() is None and native.searches() else _in_arrays

        def solve(rows: "F32", first: int) -> "U8":
            importance = weigh(first, first + len(rows))
            native.check_rows(rows, format.name, label=evidence.name, importance=importance)
            made = search(rows, importance, format, grid).reshape(len(rows), -1)
            native.check_made(made, format.name, label=evidence.name)
            return made

        return solve if accelerate.device() is None else accelerate.halved(solve, evidence.name)


def _in_arrays(
    rows: "F32", importance: native.Importance | None, format: Linear, grid: Grid
) -> "U8":
    """On a GPU, or in numpy with less effort."""
    effort = grid.long if accelerate.device() else grid.brief
    ops = accelerate.operations(accelerate.device())
    with ops.alone():
        fields = searched(rows, importance, format, grid, ops, effort)
    return format.pack(fields)


def _in_c(rows: "F32", importance: native.Importance | None, format: Linear, grid: Grid) -> "U8":
    """In C, with the importance of each matrix in its turn."""
    import numpy as np

    asked = asking(
        grid, format.low - format.zero, format.high - format.zero, grid.spread_with(importance)
    )
    even = np.ones(rows.shape[1], np.float32)
    spans = importance.spans(0, len(rows)) if importance else ((0, len(rows), even),)
    made = [
        packed(native.search(rows[first:last], grid.even(vector), asked), format, grid)
        for first, last, vector in spans
    ]
    return made[0] if len(made) == 1 else np.concatenate(made)


def asking(grid: Grid, low: int, high: int, spread: float) -> native.Searching:
    """How our C searches a grid with levels from `low` to `high`."""
    effort = grid.long
    return native.Searching(
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


def packed(found: native.Found, format: Linear, grid: Grid) -> "U8":
    """What was found as blocks, by our C too where the build has it."""
    import numpy as np

    if (made := native.packed(found, format.name)) is not None:
        return made
    with np.errstate(
        over="ignore", invalid="ignore"
    ):  # what gets infinite is refused by check_made
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
    importance: native.Importance | None,
    format: Linear,
    grid: Grid,
    ops: "Ops",
    effort: Effort,
) -> Fields:
    """The fields of the blocks of rows [rows, columns], each column weighed by `importance`."""
    import numpy as np

    count = rows.size // grid.values
    x = _filled(rows.reshape(-1, grid.groups, grid.values // grid.groups).transpose(2, 1, 0), ops)
    w = _filled(grid.columns(importance, *rows.shape).reshape(*x.shape[:2], -1), ops)
    with np.errstate(
        over="ignore", under="ignore", invalid="ignore"
    ):  # what gets infinite is refused by check_made
        if spread := grid.spread_with(importance):
            _spread(x, w, spread, ops)
        lanes, steps = stepped(
            x, w, grid, (format.low - format.zero, format.high - format.zero), ops, effort
        )
        if grid.whole is None:
            levels = lanes.levels(steps.d[None], None if steps.m is None else steps.m[None])
        else:
            levels = lanes.levels(steps.scale, steps.least)
        return _fields(levels, steps, format, count, ops)


def stepped(
    x: "Array", w: "Array", grid: Grid, levels: tuple[int, int], ops: "Ops", effort: Effort
) -> tuple[Lanes, Steps]:
    """Scales and minimums for values [values of a group, groups of a block, blocks] with weights of
    the same shape, for levels from the lowest to the highest.
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


def _filled(values: "F32", ops: "Ops") -> "Array":
    """[values of a group, groups of a block, blocks], one behind the other, with blocks of ones to
    a round number.
    """
    import numpy as np

    count = values.shape[2]
    if count % FULL == 0:
        return ops.array(values)
    filled = np.ones((*values.shape[:2], -(-count // FULL) * FULL), np.float32)
    filled[:, :, :count] = values
    return ops.array(filled)


def _spread(x: "Array", w: "Array", spread: float, ops: "Ops") -> None:
    """Let large values weigh more: a weight times sqrt(spread + x² / mean of x² in the block)."""
    mean = ops.total(ops.dot(x, x)) / (x.shape[0] * x.shape[1])
    root = x * inverted(ops.sqrt(mean))
    ops.multiply(root, root, out=root)
    ops.add(root, spread, out=root)
    ops.multiply(w, ops.sqrt(root, out=root), out=w)


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
        codes.reshape(count, -1),
        halves(steps.d),
        None if steps.m is None else halves(steps.m),
        None if steps.scales is None else whole(steps.scales),
        None if steps.mins is None else whole(steps.mins),
    )


METHODS = (Search(),)
