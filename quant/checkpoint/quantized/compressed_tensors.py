"""compressed-tensors checkpoints: packed integers, plain 8-bit integers, FP8, MXFP8, NVFP4 and
MXFP4.

Follows dequant_model of llama.cpp (conversion/base.py). Features that llama.cpp lacks follow the
compressed-tensors library: actorder, zeros that are not packed, several groups of settings, and
codes of 3, 5, 6 or 7 bits. (In the older layout of such codes each word contains whole codes, in
the newer layout a code may be split over two words.) How a tensor is decoded depends on the way it
is stored. Settings that contradict the stored form are an error.

The rows and columns of a packed matrix are stored in a tensor of their own. When the checkpoint is
opened, only that of one matrix of each kind is read, and one g_idx of each kind; the others are
compared when rows of the matrix are read.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from quant.checkpoint.config import CheckpointConfig
from quant.checkpoint.quantized import fp8, mxfp4, nvfp4
from quant.checkpoint.quantized.base import (
    REFETCH_HINT,
    LastTensorsCache,
    QuantizedInput,
    decode_values,
    make_computed_tensor,
    make_duplicate_error,
    make_input_error,
    matrix_kind,
    read_all,
    unpack_stream,
    unpack_words,
)
from quant.checkpoint.safetensors import FLOAT_DTYPES, LazyTensor, Tensors
from quant.errors import UserError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from quant.native.ggml import F32, U8

SUPPORTED_FORMATS = (
    "dense",
    "pack-quantized",
    "float-quantized",
    "int-quantized",
    "naive-quantized",
    "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
    "mxfp8-quantized",
)
ACTIVATION_ENDINGS = (*fp8.ACTIVATION_ENDINGS, ".input_zero_point", ".output_zero_point")


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """The stored tensors of one packed matrix, and what is needed to decode them.

    `groups()` returns the group of each column, `[columns]`: the columns of a group share the scale
    and the zero of a row. `zero` are the stored zeros, None if there are none. `shape` are the rows
    and columns of the decoded matrix, and `check_shape()` raises UserError if the stored shape is a
    different one. With `spans_words`, a code may be split over two words. `cache` is shared by all
    matrices of the checkpoint.
    """

    words: LazyTensor
    scale: LazyTensor
    zero: LazyTensor | None
    groups: "Callable[[], NDArray[np.int64]]"
    shape: tuple[int, int]
    check_shape: Callable[[], None]
    bits: int
    spans_words: bool
    cache: LastTensorsCache

    def read_rows(self, first: int, last: int) -> "F32":
        """Return rows first .. last of the decoded matrix as float32 `[rows, columns]`."""
        import numpy as np

        self.check_shape()
        words = decode_values(self.words.read(first, last), self.words.dtype).view(np.uint32)
        codes = self._codes(words)[:, : self.shape[1]]
        groups = self.groups()
        scales = self._read_rows_of(self.scale, first, last).astype(np.float32)
        values: F32 = (codes - self._zeros(groups, first, last)) * scales[:, groups]
        return values

    def _zeros(self, groups: "NDArray[np.int64]", first: int, last: int) -> Any:
        """Return the codes that stand for the value zero, `[rows, columns]`. If no zeros are
        stored, return the middle code as one number.
        """
        import numpy as np

        middle = 1 << (self.bits - 1)
        if self.zero is None:
            return np.float32(middle)
        if self.zero.dtype == "I32":  # packed along the rows
            stored = self.cache.read(self.zero)
            zeros = self._codes(stored.view(np.uint32).T).T[first:last].astype(np.float32)
        else:
            zeros = self._read_rows_of(self.zero, first, last).astype(np.float32) + middle
        return zeros[:, groups]

    def _codes(self, words: "NDArray[np.uint32]") -> "U8":
        """Return all codes in rows of words `[rows, words]`. Unused codes at the end of a row are
        included.
        """
        return (
            unpack_stream(words, self.bits)
            if self.spans_words
            else unpack_words(words, self.bits).reshape(len(words), -1)
        )

    def _read_rows_of(self, tensor: LazyTensor, first: int, last: int) -> "NDArray[Any]":
        """Return rows first .. last of the scales or zeros, `[rows, groups]`. A single value, which
        applies to every row, is returned as `[1, 1]`.
        """
        if tensor.shape == (1,):
            return self.cache.read(tensor).reshape(1, 1)
        return decode_values(tensor.read(first, last), tensor.dtype)


def restore(settings: CheckpointConfig, tensors: Tensors) -> Tensors:
    """Return the tensors with every packed or 8-bit weight as an F32 tensor, and every MXFP4 weight
    as ggml's blocks. The scales of activations are left out.

    Raises UserError for formats and tensors that are not supported.
    """
    weights = _weight_settings(settings)
    packed_reader = _PackedReader(settings, weights)
    result = {
        name: tensor for name, tensor in tensors.items() if not name.endswith(ACTIVATION_ENDINGS)
    }
    for name in list(result):
        if name.endswith(".weight_packed"):
            weight_name = name.removesuffix("_packed")
            if weight_name in result:
                raise make_duplicate_error(settings, weight_name)
            result[weight_name] = _pop_fp4(
                settings, result, weight_name
            ) or packed_reader.pop_matrix(result, weight_name)
        elif (
            name in result
            and result[name].dtype in ("I8", *fp8.FLOAT8_DTYPES)
            and f"{name}_scale" in result
        ):
            scale, zero = result.pop(f"{name}_scale"), result.pop(f"{name}_zero_point", None)
            _check_zeros(settings, scale, zero)
            result[name] = fp8.scale_tensor(settings, result[name], scale, _block(weights), zero)
    return result


def _weight_settings(settings: CheckpointConfig) -> list[dict[str, Any]]:
    """Return the settings of the weights in each of the checkpoint's groups of settings. Raises
    UserError for formats that are not supported.
    """
    values, groups = settings.values, settings.values.get("config_groups")
    groups = list(groups.values()) if isinstance(groups, dict) else []
    groups = [group for group in groups if isinstance(group, dict)]
    mixed = values.get("format") == "mixed-precision" and groups
    forms = [group.get("format") for group in groups] if mixed else [values.get("format")]
    if unsupported := sorted({str(form) for form in forms if form not in SUPPORTED_FORMATS}):
        raise make_input_error(
            settings, f"the compressed-tensors format {', '.join(unsupported)} is not supported"
        )
    sparsity = values.get("sparsity_config")
    if isinstance(sparsity, dict) and sparsity.get("format", "dense") != "dense":
        raise make_input_error(settings, f"the sparse format {sparsity['format']} is not supported")
    if values.get("transform_config"):
        raise make_input_error(
            settings, "its weights are rotated (transform_config), which is not supported"
        )
    return [group["weights"] for group in groups if isinstance(group.get("weights"), dict)]


def _numbers(weights: list[dict[str, Any]], key: str) -> list[int]:
    """Return the distinct positive integers under `key` in the settings of all groups, in ascending
    order.
    """
    return sorted(
        {setting[key] for setting in weights if type(setting.get(key)) is int and setting[key] > 0}
    )


def _block(weights: list[dict[str, Any]]) -> list[int] | None:
    """Return the numbers of rows and of columns that share a scale, [rows, columns]. Return None if
    the settings do not say so, or if they differ between groups of settings.
    """
    blocks: list[list[int] | None] = []
    for setting in weights:
        size = setting.get("group_size")
        blocks.append(
            setting.get("block_structure")
            or ([1, size] if type(size) is int and size > 0 else None)
        )
    return blocks[0] if blocks and all(block == blocks[0] for block in blocks) else None


def _pop_fp4(settings: CheckpointConfig, tensors: Tensors, name: str) -> LazyTensor | None:
    """Remove the tensors of one NVFP4 or MXFP4 weight from `tensors`, and return the weight: NVFP4
    as floats, MXFP4 as ggml's blocks. Return None if the codes are not four-bit floats.
    """
    codes, scale = tensors[f"{name}_packed"], tensors.get(f"{name}_scale")
    if scale is None:
        return None
    if nvfp4.is_pair(codes, scale):
        del tensors[codes.name], tensors[scale.name]
        tensor_scale = tensors.pop(f"{name}_global_scale", None)
        return nvfp4.make_float_tensor(
            settings, name, codes, scale, tensor_scale, is_reciprocal=True
        )
    if mxfp4.is_pair(codes, scale):
        del tensors[codes.name], tensors[scale.name]
        return mxfp4.make_mxfp4_tensor(name, codes, scale)
    return None


class _PackedReader:
    """Takes packed matrices out of a checkpoint's tensors. `weights` are the settings of all
    groups.
    """

    def __init__(self, settings: CheckpointConfig, weights: list[dict[str, Any]]) -> None:
        self.settings, self.weights = settings, weights
        self.cache = LastTensorsCache(4)
        self.shapes: dict[tuple[Any, ...], tuple[int, int]] = {}  # by the kind of matrix

    def pop_matrix(self, tensors: Tensors, name: str) -> LazyTensor:
        """Remove the tensors of one packed matrix from `tensors`, and return its values as an F32
        tensor. Raises UserError if they do not fit each other and the settings.
        """
        missing = [name + ending for ending in ("_scale", "_shape") if name + ending not in tensors]
        if missing:
            raise self._error(f"{name}_packed has no {' and no '.join(missing)}")
        words, scale, shape = (
            tensors.pop(name + ending) for ending in ("_packed", "_scale", "_shape")
        )
        zero, g_idx = tensors.pop(f"{name}_zero_point", None), tensors.pop(f"{name}_g_idx", None)
        if (
            words.dtype != "I32"
            or len(words.shape) != 2
            or shape.dtype not in ("I32", "I64")
            or shape.shape != (2,)
        ):
            raise self._error(
                f"{words.name} is {words.dtype} {list(words.shape)}, not int32 words of codes"
            )
        kind = matrix_kind(name, words, scale)
        if is_first := kind not in self.shapes:
            self.shapes[kind] = _read_shape(shape)
        rows, columns = self.shapes[kind]
        layout = self._find_layout(words, rows, columns)
        groups = _groups(self.settings, scale, g_idx, (rows, columns), self.weights, self.cache)
        if is_first:
            groups()
        _check_zeros(self.settings, scale, zero, rows=_words(rows, *layout))

        def check_shape() -> None:
            if tuple(self.cache.read(shape).tolist()) != (rows, columns):
                raise self._error(f"{shape.name} differs from the shapes of similar tensors")

        matrix = PackedMatrix(
            words, scale, zero, groups, (rows, columns), check_shape, *layout, self.cache
        )
        return make_computed_tensor(name, words, matrix.shape, matrix.read_rows)

    def _find_layout(self, words: LazyTensor, rows: int, columns: int) -> tuple[int, bool]:
        """Return the bits of the codes, and whether a code may be split over two words."""
        bits = _numbers(self.weights, "num_bits")
        layouts = [
            (n, dense)
            for n in bits
            if n <= 8
            for dense in ((False,) if 32 % n == 0 else (False, True))
        ]
        fitting = [layout for layout in layouts if words.shape == (rows, _words(columns, *layout))]
        if len(fitting) != 1 or columns < 1:
            sizes = ", ".join(map(str, bits)) or "no number of"
            raise self._error(
                f"{words.name} is {list(words.shape)}, which is not {rows} x {columns} codes of "
                f"{sizes} bits"
            )
        return fitting[0]

    def _error(self, problem: str) -> UserError:
        return make_input_error(self.settings, problem, hint=REFETCH_HINT)


def _read_shape(tensor: LazyTensor) -> tuple[int, int]:
    """Return the rows and columns that a tensor of two numbers contains."""
    rows, columns = (int(size) for size in read_all(tensor))
    return rows, columns


def _words(codes: int, bits: int, dense: bool) -> int:
    """Return the number of words that `codes` codes take. With `dense`, a code may be split over
    two words.
    """
    return -(-codes * bits // 32) if dense else -(-codes // (32 // bits))


def _groups(
    settings: CheckpointConfig,
    scale: LazyTensor,
    g_idx: LazyTensor | None,
    shape: tuple[int, int],
    weights: list[dict[str, Any]],
    cache: LastTensorsCache,
) -> "Callable[[], NDArray[np.int64]]":
    """Return a function that returns the group of each column, `[columns]`, as g_idx lists it.
    Without g_idx, groups are group_size neighboring columns.

    This function and the returned one raise UserError if the scale has a different number of
    groups.
    """
    rows, columns = shape
    groups = scale.shape[1] if len(scale.shape) == 2 else 1
    if scale.dtype not in FLOAT_DTYPES or scale.shape not in ((1,), (rows, groups)):
        raise make_input_error(
            settings,
            f"{scale.name} is {scale.dtype} {list(scale.shape)}, which does not fit {rows} rows",
            hint=REFETCH_HINT,
        )
    if g_idx is not None and (g_idx.dtype not in ("I32", "I64") or g_idx.shape != (columns,)):
        raise _make_group_error(settings, g_idx, columns)

    def find_groups() -> "NDArray[np.int64]":
        import numpy as np

        if g_idx is not None:
            index = cache.read(g_idx)
            if index.max() >= groups:
                raise _make_group_error(settings, g_idx, columns)
            if index.min() >= 0:  # -1 means that the columns are in their original order
                return index.astype(np.int64)
        if groups == 1:
            return np.zeros(columns, np.int64)
        fitting = [n for n in _numbers(weights, "group_size") if -(-columns // n) == groups]
        if len(fitting) != 1:
            raise make_input_error(
                settings,
                f"{scale.name} has {groups} groups for {columns} columns, which no group_size "
                "gives",
                hint=REFETCH_HINT,
            )
        return np.arange(columns) // fitting[0]

    return find_groups


def _make_group_error(settings: CheckpointConfig, g_idx: LazyTensor, columns: int) -> UserError:
    return make_input_error(
        settings,
        f"{g_idx.name} does not name a group for each of {columns} columns",
        hint=REFETCH_HINT,
    )


def _check_zeros(
    settings: CheckpointConfig, scale: LazyTensor, zero: LazyTensor | None, rows: int | None = None
) -> None:
    """Raise UserError if there are zeros of a shape that does not fit the scale. Zeros may be plain
    8-bit integers in the shape of the scale, or packed into `rows` rows of words.
    """
    if zero is None or (zero.dtype == "I8" and zero.shape == scale.shape):
        return
    if (
        rows is None
        or zero.dtype != "I32"
        or len(zero.shape) != 2
        or zero.shape != (rows, *scale.shape[1:])
    ):
        raise make_input_error(
            settings,
            f"{zero.name} is {zero.dtype} {list(zero.shape)}, which does not fit {scale.name}",
            hint=REFETCH_HINT,
        )


INPUTS = (QuantizedInput("compressed-tensors", "compressed-tensors", restore),)
