"""Widens NVFP4 weights: codes of four-bit floats (E2M1), a scale (E4M3) for 16 values, and a scale
for the tensor.

Shapes: codes `[..., rows, columns / 2]`, a byte contains the codes of two neighboring values, the
first in its low half; scales `[..., rows, columns / 16]`. ModelOpt stores the scale of the tensor,
compressed-tensors its reciprocal.

A value is computed in float32 in the order of these libraries (NVFP4QTensor.dequantize and
_dequantize), first the product of the two scales. ggml's own NVFP4 blocks would need a separate
tensor for the scale of the tensor, which llama.cpp multiplies with the result of each product.
"""

from functools import cache
from typing import TYPE_CHECKING

from quant.checkpoint.config import CheckpointConfig
from quant.checkpoint.quantized.base import (
    REFETCH_HINT,
    decode_values,
    make_computed_tensor,
    make_input_error,
    read_all,
)
from quant.checkpoint.safetensors import FLOAT_DTYPES, LazyTensor
from quant.formats.fp4 import E2M1_LEVELS

if TYPE_CHECKING:
    from quant.native.ggml import F32

GROUP_VALUES = 16  # number of values that share a scale


def is_pair(codes: LazyTensor, scales: LazyTensor) -> bool:
    """Return whether two tensors are codes of NVFP4 and their scales."""
    return (
        codes.dtype == "U8"
        and scales.dtype == "F8_E4M3"
        and len(scales.shape) > 1
        and codes.shape == (*scales.shape[:-1], scales.shape[-1] * GROUP_VALUES // 2)
    )


def make_float_tensor(
    settings: CheckpointConfig,
    name: str,
    codes: LazyTensor,
    scales: LazyTensor,
    tensor_scale: LazyTensor | None,
    *,
    is_reciprocal: bool,
) -> LazyTensor:
    """Return the values of an NVFP4 weight as one F32 tensor `[..., rows, columns]`, computed when
    it is read.

    `tensor_scale` is one number for the tensor, or one for each matrix of a stack. With
    `is_reciprocal`, the other scales are divided by it. Raises UserError if it is missing (None) or
    its shape does not fit.
    """
    if tensor_scale is None:
        raise make_input_error(
            settings, f"{codes.name} is NVFP4 without the scale of the tensor", hint=REFETCH_HINT
        )
    lead = scales.shape[:-2]
    if tensor_scale.dtype not in FLOAT_DTYPES or tensor_scale.shape not in (
        (1,),
        lead,
        (*lead, 1),
        (*lead, 1, 1),
    ):
        raise make_input_error(
            settings,
            f"{tensor_scale.name} is {tensor_scale.dtype} {list(tensor_scale.shape)}, not a scale "
            f"of {codes.name}",
            hint=REFETCH_HINT,
        )
    height = scales.shape[-2]

    def read(first: int, last: int) -> "F32":
        import numpy as np

        row_scales = decode_values(scales.read(first, last), scales.dtype)  # [rows, groups]
        factors = read_all(tensor_scale).reshape(-1)
        factors = factors[np.arange(first, last) // height % len(factors)][:, None]
        row_scales = row_scales / factors if is_reciprocal else row_scales * factors
        values = _pair_values()[codes.read(first, last)]
        result: F32 = values.reshape(last - first, -1, GROUP_VALUES) * row_scales[..., None]
        return result.reshape(last - first, -1)

    shape = (*codes.shape[:-1], codes.shape[-1] * 2)
    return make_computed_tensor(name, codes, shape, read)


@cache
def _pair_values() -> "F32":
    """Return a table of the two values of each byte of codes, float32 [256, 2]."""
    import numpy as np

    levels = np.array(E2M1_LEVELS, np.float32) / 2
    levels[8] = -0.0
    byte = np.arange(256)
    return np.stack([levels[byte & 15], levels[byte >> 4]], axis=1)
