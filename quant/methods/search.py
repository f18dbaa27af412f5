"""`--method search`: scales, minimums and codes are chosen together, weighted by the imatrix.

All groups of a chunk are searched at once (group_sums.py): first each group on its own
(group_scales.py), then together with the other groups of its superblock (superblock_scales.py). The
search runs on a GPU if torch has one, else in our C code if it is built (quant/native/searches.c),
else in numpy, the reference. On one machine the same rows give the same bytes no matter how they
are split. Another machine may give other bytes.
"""

from typing import TYPE_CHECKING

from quant.calibration.statistics import InputStatistics
from quant.formats.base import BlockFields, LinearFormat
from quant.methods.base import Method, RowEncoder
from quant.methods.group_scales import fit_group_scales
from quant.methods.group_sums import GroupSums, invert
from quant.methods.search_settings import SEARCH_SETTINGS, FormatSearchSettings, SearchEffort
from quant.methods.superblock_scales import SuperblockScales, SuperblockSearch
from quant.native import array_backends, ggml, kernels

if TYPE_CHECKING:
    from quant.formats.base import BlockFormat, Floats, Ints
    from quant.native.array_backends import Array, ArrayBackend
    from quant.native.ggml import F32, U8

# A chunk is padded to a multiple of this many blocks, so that sums do not depend on its size.
CHUNK_BLOCKS = 16
DEVICE_CHUNK_VALUES = 1 << 22  # values in a chunk on a GPU
NATIVE_CHUNK_VALUES = 1 << 17  # values in a chunk in our C code


class Search(Method):
    """The search for the k-quants and the formats with one scale for each block. Formats with a
    codebook are left to ggml.
    """

    name, help, needs = "search", "scales and codes chosen together: less error than ggml", "sums"

    def values_per_chunk(self, statistics: InputStatistics) -> int:
        """Return as many values as fit into a core's cache (in our C code), or as keep a GPU busy.
        Return 0, the pipeline's default, for numpy.
        """
        return (
            DEVICE_CHUNK_VALUES
            if array_backends.device()
            else NATIVE_CHUNK_VALUES
            if ggml.native_search()
            else 0
        )

    def can_encode(self, format: "BlockFormat", statistics: InputStatistics) -> bool:
        """Return whether the format has search settings: the k-quants and the formats with blocks
        of 32 values and evenly spaced levels have them.
        """
        return format.name in SEARCH_SETTINGS

    def backend_name(self) -> str:
        """Return the GPU's name, "C" or "numpy". Each adds sums in a different order, so the bytes
        depend on it.
        """
        return array_backends.device() or ("C" if ggml.native_search() else "numpy")

    def slow_reason(self) -> str:
        """Return why numpy searches; "" if a GPU or our C code does."""
        if array_backends.device() or ggml.native_search():
            return ""
        return kernels.open_kernels().problem

    def make_encoder(self, format: "BlockFormat", statistics: InputStatistics) -> RowEncoder:
        """Return the encoder for the format. Like ggml's encoder, it raises UserError for rows that
        the format cannot represent.
        """
        assert isinstance(format, LinearFormat)
        settings, read_importance = SEARCH_SETTINGS[format.name], statistics.importance_reader()
        search = (
            _search_in_c
            if array_backends.device() is None and ggml.native_search()
            else _search_in_arrays
        )

        def encode(rows: "F32", first: int) -> "U8":
            importance = read_importance(first, first + len(rows))
            ggml.require_encodable(rows, format.name, label=statistics.name, importance=importance)
            blocks = search(rows, importance, format, settings).reshape(len(rows), -1)
            ggml.require_finite_scales(blocks, format.name, label=statistics.name)
            return blocks

        return (
            encode
            if array_backends.device() is None
            else array_backends.retry_in_halves(encode, statistics.name)
        )


def _search_in_arrays(
    rows: "F32",
    importance: ggml.Importance | None,
    format: LinearFormat,
    settings: FormatSearchSettings,
) -> "U8":
    """Return the blocks of rows [rows, columns], searched on a GPU, or in numpy with fewer starts
    and offsets.
    """
    effort = settings.native_effort if array_backends.device() else settings.numpy_effort
    ops = array_backends.array_backend(array_backends.device())
    with ops.exclusive_access():
        fields = search_fields(rows, importance, format, settings, ops, effort)
    return format.pack(fields)


def _search_in_c(
    rows: "F32",
    importance: ggml.Importance | None,
    format: LinearFormat,
    settings: FormatSearchSettings,
) -> "U8":
    """Return the blocks of rows [rows, columns], searched in our C code: one matrix after another,
    each with its own importance.
    """
    import numpy as np

    native_settings = native_search_settings(
        settings,
        format.low - format.zero,
        format.high - format.zero,
        settings.effective_spread(importance),
    )
    uniform = np.ones(rows.shape[1], np.float32)
    spans = importance.spans(0, len(rows)) if importance else ((0, len(rows), uniform),)
    blocks = [
        pack_search_result(
            ggml.run_search(rows[first:last], settings.block_importance(vector), native_settings),
            format,
            settings,
        )
        for first, last, vector in spans
    ]
    return blocks[0] if len(blocks) == 1 else np.concatenate(blocks)


def native_search_settings(
    settings: FormatSearchSettings, low: int, high: int, spread: float
) -> ggml.ScaleSearchSettings:
    """Return the settings of a format in the form that our C code takes. Levels are from `low` to
    `high`; `spread` replaces value_spread.
    """
    effort = settings.native_effort
    return ggml.ScaleSearchSettings(
        settings.block_values // settings.groups,
        settings.groups,
        (low, high),
        settings.max_minimum,
        settings.scale_range,
        spread,
        effort.starts,
        effort.rounds,
        effort.scale_offsets,
    )


def pack_search_result(
    result: ggml.ScaleSearchResult, format: LinearFormat, settings: FormatSearchSettings
) -> "U8":
    """Return the search result as blocks [blocks, bytes], packed by our C code if it is built."""
    import numpy as np

    if (blocks := ggml.pack_blocks(result, format.name)) is not None:
        return blocks
    # infinite scales are refused later, by ggml.require_finite_scales
    with np.errstate(over="ignore", invalid="ignore"):
        d, m = result.d.astype(np.float16), result.m.astype(np.float16)
    has_integer_scales = settings.scale_range is not None
    return format.pack(
        BlockFields(
            result.levels + np.int16(format.zero),
            d,
            m if settings.max_minimum is not None else None,
            result.scales if has_integer_scales else None,
            result.mins if has_integer_scales and settings.max_minimum is not None else None,
        )
    )


def search_fields(
    rows: "F32",
    importance: ggml.Importance | None,
    format: LinearFormat,
    settings: FormatSearchSettings,
    ops: "ArrayBackend",
    effort: SearchEffort,
) -> BlockFields:
    """Search the scales and codes of rows [rows, columns]. Return the fields of the blocks, ordered
    by row and then by block. `importance` weighs the columns.
    """
    import numpy as np

    count = rows.size // settings.block_values
    x = _padded(
        rows.reshape(-1, settings.groups, settings.block_values // settings.groups).transpose(
            2, 1, 0
        ),
        ops,
    )
    w = _padded(settings.importance_array(importance, *rows.shape).reshape(*x.shape[:2], -1), ops)
    # infinite scales are refused later, by ggml.require_finite_scales
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        if spread := settings.effective_spread(importance):
            _weigh_large_values(x, w, spread, ops)
        groups, scales = search_scales(
            x, w, settings, (format.low - format.zero, format.high - format.zero), ops, effort
        )
        if settings.scale_range is None:
            levels = groups.levels(scales.d[None], None if scales.m is None else scales.m[None])
        else:
            levels = groups.levels(scales.group_steps, scales.group_minimums)
        return _to_fields(levels, scales, format, count, ops)


def search_scales(
    x: "Array",
    w: "Array",
    settings: FormatSearchSettings,
    levels: tuple[int, int],
    ops: "ArrayBackend",
    effort: SearchEffort,
) -> tuple[GroupSums, SuperblockScales]:
    """Search scales and minimums for values x [values of a group, groups of a block, blocks] with
    weights w of the same shape. `levels` are the lowest and the highest level.

    Return the sums of all groups and the best scales. Codes follow from the scales
    (GroupSums.levels).
    """
    groups = GroupSums(ops, x, w, *levels, settings.max_minimum)
    scale, minimum, sums = fit_group_scales(groups, effort.starts, effort.rounds)
    if settings.scale_range is None:
        return groups, SuperblockScales(
            ops.round_to_f16(scale)[0],
            None if minimum is None else ops.round_to_f16(minimum)[0],
            None,
            None,
        )
    search = SuperblockSearch(groups, *settings.scale_range)
    scales = search.round_scales(scale, minimum, sums)
    for offsets in effort.scale_offsets:
        scales = search.improve(scales, offsets)
    return groups, scales


def _padded(values: "F32", ops: "ArrayBackend") -> "Array":
    """Return the values [values of a group, groups of a block, blocks] as a contiguous array of the
    backend, padded with blocks of ones to a multiple of CHUNK_BLOCKS.
    """
    import numpy as np

    count = values.shape[2]
    if count % CHUNK_BLOCKS == 0:
        return ops.array(values)
    padded = np.ones((*values.shape[:2], -(-count // CHUNK_BLOCKS) * CHUNK_BLOCKS), np.float32)
    padded[:, :, :count] = values
    return ops.array(padded)


def _weigh_large_values(x: "Array", w: "Array", spread: float, ops: "ArrayBackend") -> None:
    """Increase the weights w of large values x in place: multiply them by sqrt(spread + x² / mean
    of x² in the block).
    """
    mean = ops.sum(ops.dot(x, x)) / (x.shape[0] * x.shape[1])
    factor = x * invert(ops.sqrt(mean))
    ops.multiply(factor, factor, out=factor)
    ops.add(factor, spread, out=factor)
    ops.multiply(w, ops.sqrt(factor, out=factor), out=w)


def _to_fields(
    levels: "Array", scales: SuperblockScales, format: LinearFormat, count: int, ops: "ArrayBackend"
) -> BlockFields:
    """Return levels and scales as the fields of `count` blocks, without the padding."""
    import numpy as np

    level_array = ops.to_numpy(levels)
    codes = np.empty((count, *level_array.shape[1::-1]), np.int16)
    np.copyto(codes, level_array[:, :, :count].transpose(2, 1, 0), casting="unsafe")
    codes += format.zero

    def to_f16(values: "Array") -> "Floats":
        return ops.to_numpy(values)[:count].astype(np.float16)

    def to_integers(values: "Array") -> "Ints":
        return ops.to_numpy(values)[:, :count].T.astype(np.int16)

    return BlockFields(
        codes.reshape(count, -1),
        to_f16(scales.d),
        None if scales.m is None else to_f16(scales.m),
        None if scales.scales is None else to_integers(scales.scales),
        None if scales.mins is None else to_integers(scales.mins),
    )


METHODS = (Search(),)
