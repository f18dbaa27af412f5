"""FP8 and MXFP8 checkpoints: weights as 8-bit floats, with a scale for each block, row or tensor.

Follows dequant_model of llama.cpp (conversion/base.py): a weight is its 8-bit float times its
scale. Scales of activations are left out, because llama.cpp computes nothing in FP8.
"""

from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING

from quant.checkpoint.config import CheckpointConfig
from quant.checkpoint.quantized.base import (
    QuantizedInput,
    decode_values,
    make_computed_tensor,
    make_input_error,
    read_span,
)
from quant.checkpoint.safetensors import DTYPE_BYTES, FLOAT_DTYPES, LazyTensor, Tensors

if TYPE_CHECKING:
    from quant.native.ggml import F32

MX_GROUP = 32  # number of values that share a scale in MXFP8
FLOAT8_DTYPES = ("F8_E4M3", "F8_E5M2")
# Ending of a scale's name -> ending of its weight's name.
SCALE_ENDINGS = {"_scale_inv": "", "_scale": "", ".qscale_weight": ".weight"}
ACTIVATION_ENDINGS = (
    ".input_scale",
    ".input_scale_ub",
    ".input_global_scale",
    ".activation_scale",
    "_activation_scale",
    ".qscale_act",
    ".output_scale",
    ".q_scale",
    ".k_scale",
    ".v_scale",
    ".prob_scale",
)


def restore(settings: CheckpointConfig, tensors: Tensors) -> Tensors:
    """Return the tensors with every 8-bit weight multiplied by its scale.

    A weight without a scale stays unchanged, and the converter then reports that its dtype is not
    supported. Raises UserError for scales that do not fit.
    """
    block = settings.values.get("weight_block_size")
    result = {
        name: tensor for name, tensor in tensors.items() if not name.endswith(ACTIVATION_ENDINGS)
    }
    for name, tensor in list(result.items()):
        if tensor.dtype not in FLOAT8_DTYPES:
            continue
        for ending, weight_ending in SCALE_ENDINGS.items():
            scale = (
                result.get(name.removesuffix(weight_ending) + ending)
                if name.endswith(weight_ending)
                else None
            )
            if scale is not None:
                result[name] = scale_tensor(settings, tensor, scale, block)
                del result[scale.name]
                break
    return result


def scale_tensor(
    settings: CheckpointConfig,
    tensor: LazyTensor,
    scale: LazyTensor,
    block: object = None,
    zero: LazyTensor | None = None,
) -> LazyTensor:
    """Return (`tensor` - `zero`) * `scale` as an F32 tensor, which is computed when it is read.
    Without `zero`, nothing is subtracted; `zero` has the shape of the scale.

    The scale is one number for the tensor, one for each row `[..., rows, 1]`, or one for each block
    of `block` = [rows, columns]. In MXFP8 it is a byte with an exponent for 32 values of a row.
    Raises UserError if the shapes do not fit.
    """
    exponents = (*tensor.shape[:-1], -(-tensor.shape[-1] // MX_GROUP))
    if (
        tensor.dtype in FLOAT8_DTYPES
        and scale.dtype in ("U8", "F8_E8M0")
        and scale.shape == exponents
    ):
        scale, block = replace(scale, dtype="F8_E8M0"), [1, MX_GROUP]
    height, width = _block(settings, tensor, scale, block)
    rows, columns = tensor.shape[-2:] if len(tensor.shape) > 1 else (1, tensor.shape[-1])
    down, across = -(-rows // height), -(-columns // width)
    matrices = prod(scale.shape) // (down * across)  # matrices with a scale: all, or one for all

    def read(first: int, last: int) -> "F32":
        import numpy as np

        row = np.arange(first, last)
        block_row = row // rows % matrices * down + row % rows // height
        start, stop = int(block_row.min()), int(block_row.max()) + 1

        # Reads one value for each block of the rows, and repeats it to [rows, columns].
        def expand(tensor: LazyTensor) -> "F32":
            nbytes = across * DTYPE_BYTES[tensor.dtype]
            stored = read_span(tensor, start * nbytes, stop * nbytes).reshape(-1, nbytes)
            blocks = decode_values(stored, tensor.dtype).astype(np.float32, copy=False)
            selected = blocks[block_row - start]
            expanded: F32 = (
                selected if across == 1 else np.repeat(selected, width, axis=1)[:, :columns]
            )
            return expanded

        values: F32 = decode_values(tensor.read(first, last), tensor.dtype).astype(
            np.float32, copy=False
        )
        if zero is not None:
            values = values - expand(zero)
        return np.multiply(values, expand(scale), out=values)

    return make_computed_tensor(tensor.name, tensor, tensor.shape, read)


def _block(
    settings: CheckpointConfig, tensor: LazyTensor, scale: LazyTensor, block: object
) -> tuple[int, int]:
    """Return how many rows and columns of `tensor` share one scale. Raises UserError if the shape
    of the scale fits neither a tensor, nor rows, nor the blocks in the settings.
    """
    if len(tensor.shape) < 2:
        raise make_input_error(
            settings, f"{tensor.name} is {list(tensor.shape)}: only matrices have scales"
        )
    (rows, columns), before = tensor.shape[-2:], tensor.shape[:-2]
    if scale.dtype not in (*FLOAT_DTYPES, "F8_E8M0"):
        raise make_input_error(settings, f"{scale.name} is stored as {scale.dtype}, not as floats")
    options = {(1,): (rows, columns), before: (rows, columns), (*before, 1, 1): (rows, columns)}
    options |= {(*before, rows): (1, columns), (*before, rows, 1): (1, columns)}
    if (
        isinstance(block, list)
        and len(block) == 2
        and all(type(size) is int and size > 0 for size in block)
    ):
        height, width = min(block[0], rows), min(block[1], columns)
        options[(*before, -(-rows // height), -(-columns // width))] = (height, width)
    if scale.shape not in options:
        raise make_input_error(
            settings,
            f"{scale.name} is {list(scale.shape)}, which does not fit {tensor.name} "
            f"{list(tensor.shape)}" + (f" in blocks of {block}" if block else ""),
            hint="fetch the whole model again",
        )
    return options[scale.shape]


INPUTS = (
    QuantizedInput("fp8", "FP8", restore),
    QuantizedInput("fbgemm_fp8", "FP8", restore),
)
