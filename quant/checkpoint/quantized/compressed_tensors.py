"""compressed-tensors checkpoints: packed integers, plain 8-bit integers and FP8.

Follows dequant_model of llama.cpp (conversion/base.py). Features that llama.cpp lacks follow the
compressed-tensors library: actorder, zeros that are not packed, several groups of settings, and
codes of 3, 5, 6 or 7 bits. (In the older layout of such codes each word contains whole codes, in
the newer layout a code may be split over two words.) How a tensor is decoded depends on the way it
is stored. Settings that contradict the stored form are an error.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from quant.checkpoint.config import CheckpointConfig
from quant.checkpoint.quantized import fp8
from quant.checkpoint.quantized.base import (
    REFETCH_HINT,
    QuantizedInput,
    decode_values,
    make_computed_tensor,
    make_input_error,
    read_all,
    unpack_stream,
    unpack_words,
)
from quant.checkpoint.safetensors import LazyTensor, Tensors

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
)
ACTIVATION_ENDINGS = (*fp8.ACTIVATION_ENDINGS, ".input_zero_point", ".output_zero_point")
SCALE_DTYPES = ("F32", "F16", "BF16")


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """The stored tensors of one packed matrix, and what is needed to decode them.

    `groups` is the group of each column, `[columns]`: the columns of a group share the scale and
    the zero of a row. `zero` are the stored zeros, None if there are none. `shape` are the rows and
    columns of the decoded matrix. With `spans_words`, a code may be split over two words.
    """

    words: LazyTensor
    scale: LazyTensor
    zero: LazyTensor | None
    groups: "NDArray[np.int64]"
    shape: tuple[int, int]
    bits: int
    spans_words: bool

    def read_rows(self, first: int, last: int) -> "F32":
        """Return rows first .. last of the decoded matrix as float32 `[rows, columns]`."""
        import numpy as np

        words = decode_values(self.words.read(first, last), self.words.dtype).view(np.uint32)
        codes = self._codes(words)[:, : self.shape[1]]
        scales = self._rows_of(read_all(self.scale), first, last).astype(np.float32)
        values: F32 = (codes - self._zeros(first, last)) * scales[:, self.groups]
        return values

    def _zeros(self, first: int, last: int) -> Any:
        """Return the codes that stand for the value zero, `[rows, columns]`. If no zeros are
        stored, return the middle code as one number.
        """
        import numpy as np

        middle = 1 << (self.bits - 1)
        if self.zero is None:
            return np.float32(middle)
        stored = read_all(self.zero)
        if self.zero.dtype == "I32":  # packed along the rows
            zeros = self._codes(stored.view(np.uint32).T).T[first:last].astype(np.float32)
        else:
            zeros = self._rows_of(stored, first, last).astype(np.float32) + middle
        return zeros[:, self.groups]

    def _codes(self, words: "NDArray[np.uint32]") -> "U8":
        """Return all codes in rows of words `[rows, words]`. Unused codes at the end of a row are
        included.
        """
        return (
            unpack_stream(words, self.bits)
            if self.spans_words
            else unpack_words(words, self.bits).reshape(len(words), -1)
        )

    def _rows_of(self, values: "NDArray[Any]", first: int, last: int) -> "NDArray[Any]":
        """Return rows first .. last of the scales or zeros, `[rows, groups]`. A single value, which
        applies to every row, is returned as `[1, 1]`.
        """
        return values.reshape(1, 1) if values.size == 1 else values[first:last]


def restore(settings: CheckpointConfig, tensors: Tensors) -> Tensors:
    """Return the tensors with every packed or 8-bit weight as an F32 tensor. The scales of
    activations are left out.

    Raises UserError for formats and tensors that are not supported.
    """
    weights = _weight_settings(settings)
    result = {
        name: tensor for name, tensor in tensors.items() if not name.endswith(ACTIVATION_ENDINGS)
    }
    for name in list(result):
        if name.endswith(".weight_packed"):
            weight_name = name.removesuffix("_packed")
            if weight_name in result:
                raise make_input_error(
                    settings,
                    f"{weight_name} is stored both as floats and as codes",
                    hint=REFETCH_HINT,
                )
            packed = _pop_packed(settings, result, weight_name, weights)
            result[weight_name] = make_computed_tensor(
                weight_name, packed.words, packed.shape, packed.read_rows
            )
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


def _pop_packed(
    settings: CheckpointConfig, tensors: Tensors, name: str, weights: list[dict[str, Any]]
) -> PackedMatrix:
    """Remove the tensors of one packed matrix from `tensors` and return them as a PackedMatrix.
    Raises UserError if they do not fit each other and the settings.
    """
    missing = [name + ending for ending in ("_scale", "_shape") if name + ending not in tensors]
    if missing:
        raise make_input_error(
            settings, f"{name}_packed has no {' and no '.join(missing)}", hint=REFETCH_HINT
        )
    words, scale, shape = (tensors.pop(name + ending) for ending in ("_packed", "_scale", "_shape"))
    zero, g_idx = tensors.pop(f"{name}_zero_point", None), tensors.pop(f"{name}_g_idx", None)
    if (
        words.dtype != "I32"
        or len(words.shape) != 2
        or shape.dtype not in ("I32", "I64")
        or shape.shape != (2,)
    ):
        raise make_input_error(
            settings,
            f"{words.name} is {words.dtype} {list(words.shape)}, not int32 words of codes",
            hint=REFETCH_HINT,
        )
    rows, columns = (int(size) for size in read_all(shape))
    bits = _numbers(weights, "num_bits")
    layouts = [
        (n, dense) for n in bits if n <= 8 for dense in ((False,) if 32 % n == 0 else (False, True))
    ]
    fitting = [layout for layout in layouts if words.shape == (rows, _words(columns, *layout))]
    if len(fitting) != 1 or columns < 1:
        sizes = ", ".join(map(str, bits)) or "no number of"
        raise make_input_error(
            settings,
            f"{words.name} is {list(words.shape)}, which is not {rows} x {columns} codes of "
            f"{sizes} bits",
            hint=REFETCH_HINT,
        )
    groups = _groups(settings, scale, g_idx, (rows, columns), weights)
    _check_zeros(settings, scale, zero, rows=_words(rows, *fitting[0]))
    return PackedMatrix(words, scale, zero, groups, (rows, columns), *fitting[0])


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
) -> "NDArray[np.int64]":
    """Return the group of each column, `[columns]`, as g_idx lists it. Without g_idx, groups are
    group_size neighboring columns.

    Raises UserError if the scale has a different number of groups.
    """
    import numpy as np

    rows, columns = shape
    groups = scale.shape[1] if len(scale.shape) == 2 else 1
    if scale.dtype not in SCALE_DTYPES or scale.shape not in ((1,), (rows, groups)):
        raise make_input_error(
            settings,
            f"{scale.name} is {scale.dtype} {list(scale.shape)}, which does not fit {rows} rows",
            hint=REFETCH_HINT,
        )
    if g_idx is not None:
        index = (
            read_all(g_idx) if g_idx.dtype in ("I32", "I64") and g_idx.shape == (columns,) else None
        )
        if index is None or index.max() >= groups:
            raise make_input_error(
                settings,
                f"{g_idx.name} does not name a group for each of {columns} columns",
                hint=REFETCH_HINT,
            )
        if index.min() >= 0:  # -1 means that the columns are in their original order
            return index.astype(np.int64)
    if groups == 1:
        return np.zeros(columns, np.int64)
    fitting = [n for n in _numbers(weights, "group_size") if -(-columns // n) == groups]
    if len(fitting) != 1:
        raise make_input_error(
            settings,
            f"{scale.name} has {groups} groups for {columns} columns, which no group_size gives",
            hint=REFETCH_HINT,
        )
    return np.arange(columns) // fitting[0]


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
