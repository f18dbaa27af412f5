"""compressed-tensors checkpoints: packed integers, plain eight-bit integers and FP8, as the library
stores them.

Follows dequant_model of llama.cpp (conversion/base.py), and the library's own packing where that
goes further (actorder, zeros that are not packed, several groups of settings; codes of 3, 5, 6 or 7
bits, which once stood in one word each and now follow one another without a gap). What a tensor is
follows from how it is stored; the settings must not contradict it.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from quant.archs.base import Config, Tensors
from quant.inputs import fp8
from quant.inputs.base import Input, computed, numbers, refuse, streamed, unpacked, whole
from quant.tensors import LazyTensor

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from quant.native import F32, U8

FORMATS = ("dense", "pack-quantized", "float-quantized", "int-quantized", "naive-quantized")
ACTIVATIONS = (*fp8.ACTIVATIONS, ".input_zero_point", ".output_zero_point")
FLOATS = ("F32", "F16", "BF16")
AGAIN = "fetch the whole model again"


@dataclass(frozen=True, slots=True)
class Packed:
    """One packed matrix: `groups` is the group of each column, `zero` its stored zeros or None.

    `dense` says that a code may lie in two words.
    """

    words: LazyTensor
    scale: LazyTensor
    zero: LazyTensor | None
    groups: "NDArray[np.int64]"
    shape: tuple[int, int]
    bits: int
    dense: bool

    def rows(self, first: int, last: int) -> "F32":
        """Rows as float32 [rows, columns]."""
        import numpy as np

        words = numbers(self.words.read(first, last), self.words.dtype).view(np.uint32)
        codes = self._codes(words)[:, : self.shape[1]]
        scales = self._of_rows(whole(self.scale), first, last).astype(np.float32)
        values: F32 = (codes - self._zeros(first, last)) * scales[:, self.groups]
        return values

    def _zeros(self, first: int, last: int) -> Any:
        """What stands for zero among the codes [rows, columns], or one number for all."""
        import numpy as np

        middle = 1 << (self.bits - 1)
        if self.zero is None:
            return np.float32(middle)
        stored = whole(self.zero)
        if self.zero.dtype == "I32":  # packed along the rows
            zeros = self._codes(stored.view(np.uint32).T).T[first:last].astype(np.float32)
        else:
            zeros = self._of_rows(stored, first, last).astype(np.float32) + middle
        return zeros[:, self.groups]

    def _codes(self, words: "NDArray[np.uint32]") -> "U8":
        """All codes of rows of words [rows, words], those of bits that were left over among them."""
        return (
            streamed(words, self.bits)
            if self.dense
            else unpacked(words, self.bits).reshape(len(words), -1)
        )

    def _of_rows(self, values: "NDArray[Any]", first: int, last: int) -> "NDArray[Any]":
        """Values of these rows [rows, groups]; a single number is every row's."""
        return values.reshape(1, 1) if values.size == 1 else values[first:last]


def restore(settings: Config, tensors: Tensors) -> Tensors:
    """Every packed or eight-bit weight as floats; scales of activations are left out."""
    weights = _weights(settings)
    found = {name: tensor for name, tensor in tensors.items() if not name.endswith(ACTIVATIONS)}
    for name in list(found):
        if name.endswith(".weight_packed"):
            own = name.removesuffix("_packed")
            if own in found:
                raise refuse(settings, f"{own} is there as floats and as codes", hint=AGAIN)
            packed = _packed(settings, found, own, weights)
            found[own] = computed(own, packed.words, packed.shape, packed.rows)
        elif name in found and found[name].dtype in ("I8", *fp8.CODES) and f"{name}_scale" in found:
            scale, zero = found.pop(f"{name}_scale"), found.pop(f"{name}_zero_point", None)
            _same_shape(settings, scale, zero)
            found[name] = fp8.scaled(settings, found[name], scale, _block(weights), zero)
    return found


def _weights(settings: Config) -> list[dict[str, Any]]:
    """What the settings say of weights, once for each group; refuses formats that are not undone."""
    values, groups = settings.values, settings.values.get("config_groups")
    groups = list(groups.values()) if isinstance(groups, dict) else []
    groups = [group for group in groups if isinstance(group, dict)]
    mixed = values.get("format") == "mixed-precision" and groups
    forms = [group.get("format") for group in groups] if mixed else [values.get("format")]
    if strange := sorted({str(form) for form in forms if form not in FORMATS}):
        raise refuse(
            settings, f"the compressed-tensors format {', '.join(strange)} is not undone here"
        )
    sparsity = values.get("sparsity_config")
    if isinstance(sparsity, dict) and sparsity.get("format", "dense") != "dense":
        raise refuse(settings, f"the sparse format {sparsity['format']} is not undone here")
    if values.get("transform_config"):
        raise refuse(
            settings, "its weights are rotated (transform_config), which is not undone here"
        )
    return [group["weights"] for group in groups if isinstance(group.get("weights"), dict)]


def _numbers(weights: list[dict[str, Any]], key: str) -> list[int]:
    """The different positive numbers under a key of the settings."""
    return sorted(
        {setting[key] for setting in weights if type(setting.get(key)) is int and setting[key] > 0}
    )


def _block(weights: list[dict[str, Any]]) -> list[int] | None:
    """Rows and columns that share a scale, where all groups say the same."""
    found: list[list[int] | None] = []
    for setting in weights:
        size = setting.get("group_size")
        found.append(
            setting.get("block_structure")
            or ([1, size] if type(size) is int and size > 0 else None)
        )
    return found[0] if found and all(block == found[0] for block in found) else None


def _packed(settings: Config, found: Tensors, own: str, weights: list[dict[str, Any]]) -> Packed:
    """One matrix's tensors taken out of `found`, held against one another and against the settings."""
    missing = [own + part for part in ("_scale", "_shape") if own + part not in found]
    if missing:
        raise refuse(settings, f"{own}_packed has no {' and no '.join(missing)}", hint=AGAIN)
    words, scale, shape = (found.pop(own + part) for part in ("_packed", "_scale", "_shape"))
    zero, g_idx = found.pop(f"{own}_zero_point", None), found.pop(f"{own}_g_idx", None)
    if (
        words.dtype != "I32"
        or len(words.shape) != 2
        or shape.dtype not in ("I32", "I64")
        or shape.shape != (2,)
    ):
        raise refuse(
            settings,
            f"{words.name} is {words.dtype} {list(words.shape)}, not words of codes",
            hint=AGAIN,
        )
    rows, columns = (int(size) for size in whole(shape))
    bits = _numbers(weights, "num_bits")
    layouts = [
        (n, dense) for n in bits if n <= 8 for dense in ((False,) if 32 % n == 0 else (False, True))
    ]
    fitting = [layout for layout in layouts if words.shape == (rows, _words(columns, *layout))]
    if len(fitting) != 1 or columns < 1:
        told = ", ".join(map(str, bits)) or "no number of"
        raise refuse(
            settings,
            f"{words.name} is {list(words.shape)}, which is not {rows} x {columns} codes of {told} bits",
            hint=AGAIN,
        )
    groups = _groups(settings, scale, g_idx, (rows, columns), weights)
    _same_shape(settings, scale, zero, rows=_words(rows, *fitting[0]))
    return Packed(words, scale, zero, groups, (rows, columns), *fitting[0])


def _words(codes: int, bits: int, dense: bool) -> int:
    """How many words so many codes take."""
    return -(-codes * bits // 32) if dense else -(-codes // (32 // bits))


def _groups(
    settings: Config,
    scale: LazyTensor,
    g_idx: LazyTensor | None,
    shape: tuple[int, int],
    weights: list[dict[str, Any]],
) -> "NDArray[np.int64]":
    """The group of each column, by g_idx or one after another; the scale must have as many groups."""
    import numpy as np

    rows, columns = shape
    groups = scale.shape[1] if len(scale.shape) == 2 else 1
    if scale.dtype not in FLOATS or scale.shape not in ((1,), (rows, groups)):
        raise refuse(
            settings,
            f"{scale.name} is {scale.dtype} {list(scale.shape)} for {rows} rows",
            hint=AGAIN,
        )
    if g_idx is not None:
        index = (
            whole(g_idx) if g_idx.dtype in ("I32", "I64") and g_idx.shape == (columns,) else None
        )
        if index is None or index.max() >= groups:
            raise refuse(
                settings,
                f"{g_idx.name} does not name a group for each of {columns} columns",
                hint=AGAIN,
            )
        if index.min() >= 0:  # -1 stands for columns in their own order
            return index.astype(np.int64)
    if groups == 1:
        return np.zeros(columns, np.int64)
    fitting = [n for n in _numbers(weights, "group_size") if -(-columns // n) == groups]
    if len(fitting) != 1:
        raise refuse(
            settings,
            f"{scale.name} has {groups} groups for {columns} columns, which group_size does not give",
            hint=AGAIN,
        )
    return np.arange(columns) // fitting[0]


def _same_shape(
    settings: Config, scale: LazyTensor, zero: LazyTensor | None, rows: int | None = None
) -> None:
    """Refuse zeros of another shape than the scale's; packed ones have `rows` rows of words."""
    if zero is None or (zero.dtype == "I8" and zero.shape == scale.shape):
        return
    if (
        rows is None
        or zero.dtype != "I32"
        or len(zero.shape) != 2
        or zero.shape != (rows, *scale.shape[1:])
    ):
        raise refuse(
            settings,
            f"{zero.name} is {zero.dtype} {list(zero.shape)}, which does not fit {scale.name}",
            hint=AGAIN,
        )


INPUTS = (Input("compressed-tensors", "compressed-tensors", restore),)
