"""Checkpoints with weights as signed bytes (tensor NAME) and a scale per row (NAME_row_scale)."""

from typing import TYPE_CHECKING

from quant.checkpoint.config import CheckpointConfig
from quant.checkpoint.quantized.base import QuantizedInput, decode_values, make_computed_tensor
from quant.checkpoint.safetensors import LazyTensor, Tensors

if TYPE_CHECKING:
    from quant.native.ggml import F32

SCALE = "_row_scale"


def restore(settings: CheckpointConfig, tensors: Tensors) -> Tensors:
    """Return the tensors, with every pair of bytes and scales replaced by one float tensor."""
    result = dict(tensors)
    for name, codes in tensors.items():
        if codes.dtype == "I8" and name + SCALE in tensors:
            result[name] = apply_scales(codes, result.pop(name + SCALE))
    return result


def apply_scales(codes: LazyTensor, scales: LazyTensor) -> LazyTensor:
    """Return the float tensor codes * scales, whose rows are computed when they are read."""

    def read(first: int, last: int) -> "F32":
        factors = decode_values(scales.read(first, last), scales.dtype)
        values: F32 = decode_values(codes.read(first, last), codes.dtype) * factors
        return values

    return make_computed_tensor(codes.name, codes, codes.shape, read)


INPUTS = (QuantizedInput("row_int8", "INT8 with row scales", restore),)
