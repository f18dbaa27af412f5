"""`--method search`: scales, minimums and codes are chosen together, weighted by the imatrix.

All groups of a chunk are searched at once (group_sums.py), first each group by itself
(group_scales.py), then together with its superblock (superblock_scales.py). The search runs on a
GPU if torch has one, else in our C code if it is built (quant/native/searches.c), else in numpy,
the reference. On one machine the same rows give the same bytes however they are split; another
machine may give other bytes.
"""

from typing import TYPE_CHECKING

from quant.calibration.statistics import InputStatistics
from quant.formats.base import BlockFields, LinearFormat
from quant.methods.base import Method, RowEncoder
from quant.methods.group_scales import fit_group_scales
from quant.methods.group_sums import GroupSums, invert
from quant.methods.search_settings import SEARCH_SETTINGS, FormatSearchSettings, SearchEffort
from quant.methods.superblock_scales import SuperblockScales, SuperblockSearch
from quant.native import array_backends, ggml

if TYPE_CHECKING:
    from quant.formats.base import BlockFormat, Floats, Ints
    from quant.native.array_backends import Array, ArrayBackend
    from quant.native.ggml import F32, U8

# a chunk is padded to a multiple of this many blocks, so that sums do not depend on its size
CHUNK_BLOCKS = 16
DEVICE_CHUNK_VALUES, NATIVE_CHUNK_VALUES = (
    1 << 22,
    1 << 17,
)  # values in a chunk on a GPU, and in our C code


class Search(Method):
    """The search for the k-quants and the types with one scale per block; types with a codebook are
    left to ggml.
    """

    name, help, needs = "search", "scales and codes chosen together: less error than ggml", "sums"

    def values_per_chunk(self, statistics: InputStatistics) -> int:
        """Return as many values as fit into a core's cache, or as fill a GPU; 0, the pipeline's
        default, for numpy.
        """
        return (
            DEVICE_CHUNK_VALUES
            if array_backends.device()
            else NATIVE_CHUNK_VALUES
            if ggml.native_search()
            else 0
        )

    def can_encode(self, format: "BlockFormat", statistics: InputStatistics) -> bool:
        """Return whether the format has search settings, as all formats with evenly spaced levels
        do.
        """
        return format.name in SEARCH_SETTINGS

    def backend_name(self) -> str:
        """Return the GPU's name, "C" or "numpy". Sums are added in a different order on each, so
        the bytes depend on it.
        """
        return array_backends.device() or ("C" if ggml.native_search() else "numpy")

    def make_encoder(self, format: "BlockFormat", statistics: InputStatistics) -> RowEncoder:
        """Return the encoder for the format. Like ggml's encoder, it raises UserError for rows that
        the format cannot represent.
        """
        assert isinstance(format, LinearFormat)
        grid, weigh = SEARCH_SETTINGS[format.name], statistics.importance_reader()
        search = (
            _search_in_c
            if array_backends.device() is None and ggml.native_search()
            else _search_in_arrays
        )

        def solve(rows: "F32", first: int) -> "U8":
            importance = weigh(first, first + len(rows))
            ggml.require_encodable(rows, format.name, label=statistics.name, importance=importance)
            blocks = search(rows, importance, format, grid).reshape(len(rows), -1)
            ggml.require_finite_scales(blocks, format.name, label=statistics.name)
            return blocks

        return (
            solve
            if array_backends.device() is None
            else array_backends.retry_in_halves(solve, statistics.name)
        )


def _search_in_arrays(
    rows: "F32",
    importance: ggml.Importance | None,
    format: LinearFormat,
    grid: FormatSearchSettings,
) -> "U8":
    """Search on a GPU, or in numpy with fewer starts and offsets."""
    effort = grid.native_effort if array_backends.device() else grid.numpy_effort
    ops = array_backends.array_backend(array_backends.device())
    with ops.exclusive_access():
        fields = search_fields(rows, importance, format, grid, ops, effort)
    return format.pack(fields)


def _search_in_c(
    rows: "F32",
    importance: ggml.Importance | None,
    format: LinearFormat,
    grid: FormatSearchSettings,
) -> "U8":
    """Search in our C code, one matrix after another, each with its own importance."""
    import numpy as np

    settings = native_search_settings(
        grid, format.low - format.zero, format.high - format.zero, grid.effective_spread(importance)
    )
    even = np.ones(rows.shape[1], np.float32)
    spans = importance.spans(0, len(rows)) if importance else ((0, len(rows), even),)
    pieces = [
        pack_search_result(
            ggml.run_search(rows[first:last], grid.block_importance(vector), settings), format, grid
        )
        for first, last, vector in spans
    ]
    return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)


def native_search_settings(
    grid: FormatSearchSettings, low: int, high: int, spread: float
) -> ggml.ScaleSearchSettings:
    """Return the settings with which our C code searches a grid with levels from `low` to
    `high`.
    """
    effort = grid.native_effort
    return ggml.ScaleSearchSettings(
        grid.block_values // grid.groups,
        grid.groups,
        (low, high),
        grid.max_minimum,
        grid.scale_range,
        spread,
        effort.starts,
        effort.rounds,
        effort.scale_offsets,
    )


def pack_search_result(
    result: ggml.ScaleSearchResult, format: LinearFormat, grid: FormatSearchSettings
) -> "U8":
    """Return the search result as blocks, packed by our C code if it is built."""
    import numpy as np

    if (blocks := ggml.pack_blocks(result, format.name)) is not None:
        return blocks
    # infinite scales are refused later, by ggml.require_finite_scales
    with np.errstate(over="ignore", invalid="ignore"):
        d, m = result.d.astype(np.float16), result.m.astype(np.float16)
    whole = grid.scale_range is not None
    return format.pack(
        BlockFields(
            result.levels + np.int16(format.zero),
            d,
            m if grid.max_minimum is not None else None,
            result.scales if whole else None,
            result.mins if whole and grid.max_minimum is not None else None,
        )
    )


def search_fields(
    rows: "F32",
    importance: ggml.Importance | None,
    format: LinearFormat,
    grid: FormatSearchSettings,
    ops: "ArrayBackend",
    effort: SearchEffort,
) -> BlockFields:
    """Return the fields of the blocks of rows [rows, columns], with columns weighted by
    `importance`.
    """
    import numpy as np

    count = rows.size // grid.block_values
    x = _padded(
        rows.reshape(-1, grid.groups, grid.block_values // grid.groups).transpose(2, 1, 0), ops
    )
    w = _padded(grid.importance_array(importance, *rows.shape).reshape(*x.shape[:2], -1), ops)
    # infinite scales are refused later, by ggml.require_finite_scales
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        if spread := grid.effective_spread(importance):
            _weigh_large_values(x, w, spread, ops)
        lanes, steps = search_scales(
            x, w, grid, (format.low - format.zero, format.high - format.zero), ops, effort
        )
        if grid.scale_range is None:
            levels = lanes.levels(steps.d[None], None if steps.m is None else steps.m[None])
        else:
            levels = lanes.levels(steps.group_steps, steps.group_minimums)
        return _to_fields(levels, steps, format, count, ops)


def search_scales(
    x: "Array",
    w: "Array",
    grid: FormatSearchSettings,
    levels: tuple[int, int],
    ops: "ArrayBackend",
    effort: SearchEffort,
) -> tuple[GroupSums, SuperblockScales]:
    """Search scales and minimums for values x [values of a group, groups of a block, blocks] with
    weights w of the same shape; `levels` are the lowest and the highest level.
    """
    lanes = GroupSums(ops, x, w, *levels, grid.max_minimum)
    scale, least, sums = fit_group_scales(lanes, effort.starts, effort.rounds)
    if grid.scale_range is None:
        return lanes, SuperblockScales(
            ops.round_to_f16(scale)[0],
            None if least is None else ops.round_to_f16(least)[0],
            None,
            None,
        )
    search = SuperblockSearch(lanes, *grid.scale_range)
    steps = search.round_scales(scale, least, sums)
    for around in effort.scale_offsets:
        steps = search.improve(steps, around)
    return lanes, steps


def _padded(values: "F32", ops: "ArrayBackend") -> "Array":
    """Return the values [values of a group, groups of a block, blocks] as a contiguous array,
    padded with blocks of ones to a multiple of CHUNK_BLOCKS.
    """
    import numpy as np

    count = values.shape[2]
    if count % CHUNK_BLOCKS == 0:
        return ops.array(values)
    padded = np.ones((*values.shape[:2], -(-count // CHUNK_BLOCKS) * CHUNK_BLOCKS), np.float32)
    padded[:, :, :count] = values
    return ops.array(padded)


def _weigh_large_values(x: "Array", w: "Array", spread: float, ops: "ArrayBackend") -> None:
    """Increase the weight of large values: multiply weights by sqrt(spread + x² / mean of x² in the
    block).
    """
    mean = ops.sum(ops.dot(x, x)) / (x.shape[0] * x.shape[1])
    root = x * invert(ops.sqrt(mean))
    ops.multiply(root, root, out=root)
    ops.add(root, spread, out=root)
    ops.multiply(w, ops.sqrt(root, out=root), out=w)


def _to_fields(
    levels: "Array", steps: SuperblockScales, format: LinearFormat, count: int, ops: "ArrayBackend"
) -> BlockFields:
    """Return the levels and scales as the format's fields, without the padding."""
    import numpy as np

    numbers = ops.to_numpy(levels)
    codes = np.empty((count, *numbers.shape[1::-1]), np.int16)
    np.copyto(codes, numbers[:, :, :count].transpose(2, 1, 0), casting="unsafe")
    codes += format.zero

    def halves(values: "Array") -> "Floats":
        return ops.to_numpy(values)[:count].astype(np.float16)

    def whole(values: "Array") -> "Ints":
        return ops.to_numpy(values)[:, :count].T.astype(np.int16)

    return BlockFields(
        codes.reshape(count, -1),
        halves(steps.d),
        None if steps.m is None else halves(steps.m),
        None if steps.scales is None else whole(steps.scales),
        None if steps.mins is None else whole(steps.mins),
    )


METHODS = (Search(),)
