"""Checkpoints of AMD's Quark: MXFP4 and FP8. Each weight is decoded by the way it is stored.

MXFP4: NAME are bytes with the codes of two neighboring values, the first in the low half
(quark/torch/utils/pack.py, Pack_fp4), and NAME_scale bytes with the exponents of 32 values each.
Other settings, such as integers and MXFP6, are refused.
"""

from quant.checkpoint.config import CheckpointConfig
from quant.checkpoint.quantized import fp8, mxfp4
from quant.checkpoint.quantized.base import QuantizedInput, make_input_error
from quant.checkpoint.safetensors import Tensors

SUPPORTED_DTYPES = ("fp4", "fp8_e4m3", "fp8_e5m2")


def restore(settings: CheckpointConfig, tensors: Tensors) -> Tensors:
    """Return the tensors with every MXFP4 weight as ggml's blocks and every FP8 weight as an F32
    tensor. Raises UserError for settings that are not supported.
    """
    names = [
        weight.get("dtype")
        for layer in _layer_settings(settings)
        for weight in _as_list(layer.get("weight"))
    ]
    if unsupported := sorted({str(name) for name in names if name not in SUPPORTED_DTYPES}):
        raise make_input_error(
            settings,
            f"Quark with {', '.join(unsupported)} is not supported; {', '.join(SUPPORTED_DTYPES)} "
            "are",
        )
    return fp8.restore(settings, mxfp4.restore_pairs(tensors, "", "_scale"))


def _layer_settings(settings: CheckpointConfig) -> list[dict[str, object]]:
    """Return the settings of all layers: those of the whole model, and those of some layers."""
    found = [settings.values.get("global_quant_config")]
    for key in ("layer_quant_config", "layer_type_quant_config"):
        layers = settings.values.get(key)
        found += list(layers.values()) if isinstance(layers, dict) else []
    return [layer for layer in found if isinstance(layer, dict)]


def _as_list(value: object) -> list[dict[str, object]]:
    """Return the settings of a layer's weight as a list: several mean several steps."""
    values = value if isinstance(value, list) else [value]
    return [item for item in values if isinstance(item, dict)]


INPUTS = (QuantizedInput("quark", "Quark", restore),)
