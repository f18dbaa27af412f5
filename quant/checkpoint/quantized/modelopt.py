"""Checkpoints of NVIDIA's ModelOpt: FP8, NVFP4 and MXFP4, also mixed in one checkpoint.

Each weight is decoded by the way it is stored (modelopt/torch/export/quant_utils.py): 8-bit floats
with NAME_scale are FP8 or MXFP8; bytes of codes with NAME_scale in E4M3 and NAME_scale_2 are NVFP4;
bytes of codes with bytes of exponents are MXFP4. Layers that the settings exclude are floats.
Scales of activations and of the KV cache are left out.
"""

from quant.checkpoint.config import CheckpointConfig
from quant.checkpoint.quantized import fp8, mxfp4, nvfp4
from quant.checkpoint.quantized.base import QuantizedInput, make_input_error
from quant.checkpoint.safetensors import Tensors

SUPPORTED_ALGORITHMS = (
    "FP8",
    "FP8_PER_CHANNEL_PER_TOKEN",
    "NVFP4",
    "NVFP4_AWQ",
    "W4A16_NVFP4",
    "MXFP4",
    "W4A8_MXFP4_FP8",
    "MXFP8",
    "MIXED_PRECISION",
)


def restore(settings: CheckpointConfig, tensors: Tensors) -> Tensors:
    """Return the tensors with every FP8 and NVFP4 weight as an F32 tensor, and every MXFP4 weight
    as ggml's blocks.

    A weight without scales stays unchanged, and the converter then reports that its dtype is not
    supported. Raises UserError for settings that are not supported.
    """
    algorithm = settings.values.get("quant_algo")
    if algorithm is not None and algorithm not in SUPPORTED_ALGORITHMS:
        raise make_input_error(settings, f"{algorithm} is not supported; FP8, NVFP4 and MXFP4 are")
    result = dict(tensors)
    for name, tensor in tensors.items():
        scale = tensors.get(f"{name}_scale")
        if scale is not None and nvfp4.is_pair(tensor, scale):
            tensor_scale = result.pop(f"{name}_scale_2", None)
            result[name] = nvfp4.make_float_tensor(
                settings, name, tensor, scale, tensor_scale, is_reciprocal=False
            )
            del result[scale.name]
    return fp8.restore(settings, mxfp4.restore_pairs(result, "", "_scale"))


INPUTS = (
    QuantizedInput("modelopt", "ModelOpt", restore),
    QuantizedInput("modelopt_fp4", "ModelOpt", restore),
    QuantizedInput("modelopt_mixed", "ModelOpt", restore),
)
