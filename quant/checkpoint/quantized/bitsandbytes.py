"""bitsandbytes checkpoints: weights as codes of 4 bits (nf4 and fp4), also with quantized scales
(double quantization), and as 8-bit integers with a scale for each row.

Follows bitsandbytes (bitsandbytes/functional.py, backends/default/ops.py), in float32:

- 4 bits: NAME contains the codes of all values in order, the first of a byte in its high half. A
  code stands for a value in NAME.quant_map `[16]`; `blocksize` values share a scale in NAME.absmax.
  NAME.quant_state.bitsandbytes__nf4 (or fp4) is a JSON text with the shape and the block sizes.
  With quantized scales, absmax are bytes, which stand for values in NAME.nested_quant_map `[256]`;
  `nested_blocksize` of them share a scale in NAME.nested_absmax, and `nested_offset` is added.
- 8 bits: NAME are 8-bit integers, SCB `[rows]` the largest value of each row, which 127 stands for.

When the checkpoint is opened, the JSON text of one matrix of each kind is read, for its shape; the
others are read with the rows.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

from quant.checkpoint.config import CheckpointConfig
from quant.checkpoint.quantized.base import (
    REFETCH_HINT,
    LastTensorsCache,
    QuantizedInput,
    decode_values,
    make_computed_tensor,
    make_input_error,
    matrix_kind,
    read_span,
)
from quant.checkpoint.safetensors import DTYPE_BYTES, LazyTensor, Tensors

if TYPE_CHECKING:
    from quant.native.ggml import F32

STATE_MARK = ".quant_state.bitsandbytes__"
TYPES = ("nf4", "fp4")
MAX_STATE_BYTES, MAX_SIZE = 1 << 16, 1 << 40
ROW_SCALE_ENDING, FORMAT_ENDING = "SCB", "weight_format"
INTEGER_RANGE = 127


@dataclass(frozen=True, slots=True)
class QuantState:
    """The settings in the JSON text of a matrix: its shape, the number of values that share a
    scale, and the number of scales that share a scale (0 if the scales are floats), to which
    `offset` is added.
    """

    shape: tuple[int, int]
    block: int
    nested_block: int
    offset: float


@dataclass(frozen=True, slots=True)
class CodedMatrix:
    """The stored tensors of one matrix of 4-bit codes. `nested_map` and `nested_scales` are None if
    the scales are floats. `state()` reads the settings of the matrix. `cache` is shared by all
    matrices of the checkpoint.
    """

    codes: LazyTensor
    value_map: LazyTensor
    scales: LazyTensor
    nested_map: LazyTensor | None
    nested_scales: LazyTensor | None
    state: Callable[[], QuantState]
    cache: LastTensorsCache

    def read_rows(self, first: int, last: int) -> "F32":
        """Return rows first .. last of the decoded matrix as float32 `[rows, columns]`."""
        import numpy as np

        state = self.state()
        columns = state.shape[1]
        start, stop = first * columns, last * columns  # numbers of values
        data = read_span(self.codes, start // 2, -(-stop // 2))
        codes = np.stack([data >> 4, data & 15], axis=1).reshape(-1)
        codes = codes[start % 2 :][: stop - start]
        block = np.arange(start, stop) // state.block
        values: F32 = self.cache.read(self.value_map).reshape(-1)[codes]
        values *= self._scales(state, int(block[0]), int(block[-1]) + 1)[block - block[0]]
        return values.reshape(last - first, columns)

    def _scales(self, state: QuantState, first: int, last: int) -> "F32":
        """Return the scales of blocks first .. last, `[blocks]`."""
        import numpy as np

        stored = self.cache.read(self.scales)[first:last]
        if self.nested_map is None or self.nested_scales is None:
            return stored
        group = np.arange(first, last) // state.nested_block
        scales: F32 = self.cache.read(self.nested_map)[stored]
        scales = scales * self.cache.read(self.nested_scales)[group]
        return scales + np.float32(state.offset)


def restore(settings: CheckpointConfig, tensors: Tensors) -> Tensors:
    """Return the tensors with every quantized weight as an F32 tensor. Raises UserError for tensors
    that are not supported.
    """
    result, cache = dict(tensors), LastTensorsCache(6)
    shapes: dict[tuple[Any, ...], tuple[int, int]] = {}  # by the kind of matrix
    for name in tensors:
        if STATE_MARK in name:
            weight_name, _, kind = name.partition(STATE_MARK)
            if kind not in TYPES:
                raise make_input_error(
                    settings, f"{name}: {kind} is not supported; nf4 and fp4 are"
                )
            result[weight_name] = _pop_coded(settings, result, weight_name, name, shapes, cache)
    for name in list(result):
        base = name.removesuffix("weight")
        scale = result.get(f"{base}{ROW_SCALE_ENDING}")
        if name.endswith(".weight") and result[name].dtype == "I8" and scale is not None:
            del result[scale.name]
            result.pop(f"{base}{FORMAT_ENDING}", None)
            result[name] = _scale_integers(settings, result[name], scale)
    return result


def _pop_coded(
    settings: CheckpointConfig,
    tensors: Tensors,
    name: str,
    state_name: str,
    shapes: dict[tuple[Any, ...], tuple[int, int]],
    cache: LastTensorsCache,
) -> LazyTensor:
    """Remove the tensors of one matrix of 4-bit codes from `tensors`, and return its values.
    `shapes` are the known shapes, by the kind of matrix. Raises UserError if the tensors do not fit
    each other.
    """
    missing = [
        part for part in (name, f"{name}.absmax", f"{name}.quant_map") if part not in tensors
    ]
    if missing:
        raise make_input_error(
            settings, f"{state_name} has no {' and no '.join(missing)}", hint=REFETCH_HINT
        )
    state_tensor, codes = tensors.pop(state_name), tensors.pop(name)
    scales, value_map = tensors.pop(f"{name}.absmax"), tensors.pop(f"{name}.quant_map")
    nested_map = tensors.pop(f"{name}.nested_quant_map", None)
    nested_scales = tensors.pop(f"{name}.nested_absmax", None)
    kind = matrix_kind(name, codes, scales)
    if is_first := kind not in shapes:
        shapes[kind] = _read_state(settings, state_tensor, cache).shape
    shape = shapes[kind]

    def state() -> QuantState:
        found = _read_state(settings, state_tensor, cache)
        stored = (codes, value_map, scales, nested_map, nested_scales)
        if found.shape != shape or not _fit(found, *stored):
            raise make_input_error(
                settings,
                f"{name} and its scales do not fit the {shape[0]} x {shape[1]} values that "
                f"{state_name} names",
                hint=REFETCH_HINT,
            )
        return found

    if is_first:
        state()
    matrix = CodedMatrix(codes, value_map, scales, nested_map, nested_scales, state, cache)
    return make_computed_tensor(name, codes, shape, matrix.read_rows)


def _fit(
    state: QuantState,
    codes: LazyTensor,
    value_map: LazyTensor,
    scales: LazyTensor,
    nested_map: LazyTensor | None,
    nested_scales: LazyTensor | None,
) -> bool:
    """Return whether the shapes and dtypes of a matrix's tensors fit its settings."""
    values = prod(state.shape)
    blocks = -(-values // state.block)
    if (
        prod(codes.shape) * DTYPE_BYTES[codes.dtype] != -(-values // 2)
        or scales.shape != (blocks,)
        or (value_map.dtype, value_map.shape) != ("F32", (16,))
    ):
        return False
    if nested_map is None or nested_scales is None:
        return scales.dtype == "F32" and nested_map is nested_scales
    return (
        scales.dtype == "U8"
        and state.nested_block > 0
        and (nested_map.dtype, nested_map.shape) == ("F32", (256,))
        and nested_scales.dtype == "F32"
        and nested_scales.shape == (-(-blocks // state.nested_block),)
    )


def _read_state(
    settings: CheckpointConfig, tensor: LazyTensor, cache: LastTensorsCache
) -> QuantState:
    """Return the settings in the JSON text of a matrix. Raises UserError if it is malformed."""
    try:
        if tensor.dtype != "U8" or prod(tensor.shape) > MAX_STATE_BYTES:
            raise ValueError
        values = json.loads(cache.read(tensor).tobytes())
        rows, columns = values["shape"]
        state = QuantState(
            (rows, columns),
            values["blocksize"],
            values.get("nested_blocksize", 0),
            float(values.get("nested_offset", 0)),
        )
        sizes = (rows, columns, state.block)
        if any(type(size) is not int or not 0 < size < MAX_SIZE for size in sizes):
            raise ValueError
        if type(state.nested_block) is not int:
            raise ValueError
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        raise make_input_error(
            settings, f"{tensor.name} is not the description of a matrix", hint=REFETCH_HINT
        ) from None
    return state


def _scale_integers(settings: CheckpointConfig, codes: LazyTensor, scale: LazyTensor) -> LazyTensor:
    """Return a matrix of 8-bit integers times its row scales / 127, as an F32 tensor that is
    computed when it is read. Raises UserError if the scales do not fit.
    """
    if len(codes.shape) != 2 or scale.shape != codes.shape[:1] or scale.dtype != "F32":
        raise make_input_error(
            settings,
            f"{scale.name} is {scale.dtype} {list(scale.shape)}, which does not fit {codes.name} "
            f"{list(codes.shape)}",
            hint=REFETCH_HINT,
        )

    def read(first: int, last: int) -> "F32":
        import numpy as np

        values = decode_values(codes.read(first, last), codes.dtype).astype(np.float32)
        scales = read_span(scale, first * 4, last * 4).view(np.float32)[:, None]
        result: F32 = values * scales * np.float32(1 / INTEGER_RANGE)
        return result

    return make_computed_tensor(codes.name, codes, codes.shape, read)


INPUTS = (QuantizedInput("bitsandbytes", "bitsandbytes", restore),)
