"""Rotary positions: the settings of config.json, their metadata keys, and the order of rows and
the frequency factors that llama.cpp expects.

Follows TextModel.set_gguf_parameters of llama.cpp (conversion/base.py).
"""

import math
from typing import TYPE_CHECKING, Any

from quant.checkpoint import tensor_views
from quant.checkpoint.config import CheckpointConfig
from quant.convert.parts import layout
from quant.convert.parts.base import ArchKey, TensorOp
from quant.errors import UserError

if TYPE_CHECKING:
    from quant.native.ggml import F32

ORIGINAL_LENGTH_KEY = "original_max_position_embeddings"
ROPE_TYPES = ("default", "linear", "yarn")
# for families whose graph in llama.cpp also reads rope_freqs.weight
ROPE_TYPES_WITH_FACTORS = (*ROPE_TYPES, "llama3")


def rope_settings(config: CheckpointConfig, layer_type: str = "full_attention") -> CheckpointConfig:
    """Return the rotary settings (rope_type, rope_theta, factor, ...) as one config. config.json
    has them either in rope_scaling or in rope_parameters.

    If config.json has separate settings for each layer type, those of `layer_type` are returned. As
    in transformers, original_max_position_embeddings defaults to max_position_embeddings, and its
    value at the root of config.json takes precedence.
    """
    settings: dict[str, Any] = {
        "rope_theta": 10000.0,
        ORIGINAL_LENGTH_KEY: config.values.get("max_position_embeddings"),
    }
    for key in ("rope_theta", "partial_rotary_factor"):
        if (value := config.values.get(key)) is not None:
            settings[key] = value
    for key in ("rope_scaling", "rope_parameters"):
        value = config.values.get(key)
        if isinstance(value, dict) and layer_type in value:
            value = value[layer_type]
        if isinstance(value, dict):
            settings |= {name: item for name, item in value.items() if item is not None}
    if (value := config.values.get(ORIGINAL_LENGTH_KEY)) is not None:
        settings[ORIGINAL_LENGTH_KEY] = value
    settings["rope_type"] = settings.get("rope_type", settings.get("type", "default"))
    return CheckpointConfig(settings, config.location)


def rotary_width(config: CheckpointConfig) -> int:
    """Return how many values of a head are rotary: the head's width times partial_rotary_factor.

    Raises UserError unless this is an even number of at least two values.
    """
    head_dim, factor = (
        layout.head_counts(config)[2],
        rope_settings(config).get_float("partial_rotary_factor", 1.0),
    )
    count = int(head_dim * factor)
    if factor > 1 or count < 2 or count % 2:
        raise UserError(
            f"{config.location}: partial_rotary_factor {factor} of {head_dim} values does not give "
            "whole rotary pairs",
            hint="fetch it again",
        )
    return count


def rope_row_order(heads: int, head_dim: int) -> list[int]:
    """Return the row order that turns rotary heads whose two halves are stored one after the other
    into heads of interleaved pairs.

    In each head, row 2i of the result is row i of the source, and row 2i + 1 is row i + head_dim/2.
    """
    half = head_dim // 2
    return [
        head * head_dim + half_index * half + pair
        for head in range(heads)
        for pair in range(half)
        for half_index in (0, 1)
    ]


def rope_scaling_keys(settings: CheckpointConfig) -> list[ArchKey]:
    """Return the metadata keys of linear or yarn rope scaling. For other rope types there are no
    keys.
    """
    if settings.values["rope_type"] == "linear":
        factor = settings.get_float("factor")
        return [
            ArchKey("rope.scaling.type", "string", "linear"),
            ArchKey("rope.scaling.factor", "float32", factor),
        ]
    if settings.values["rope_type"] == "yarn":
        return _yarn(settings)
    return []


def _yarn(settings: CheckpointConfig) -> list[ArchKey]:
    """Return the metadata keys of yarn scaling.

    llama.cpp itself multiplies sines and cosines by 1 + ln(factor) / 10 (rope_yarn in ggml-cpu).
    Therefore the key attn_factor is the checkpoint's attention factor divided by this number.
    """
    return [
        ArchKey("rope.scaling.type", "string", "yarn"),
        ArchKey("rope.scaling.factor", "float32", settings.get_float("factor")),
        ArchKey(
            "rope.scaling.original_context_length", "uint32", settings.get_int(ORIGINAL_LENGTH_KEY)
        ),
        ArchKey(
            "rope.scaling.attn_factor",
            "float32",
            yarn_attention_factor(settings) / yarn_scale(settings),
        ),
    ]


def yarn_scale(settings: CheckpointConfig, weight: float = 1.0) -> float:
    """Return 1 + weight * ln(factor) / 10. All of yarn's scaling factors have this form. `weight`
    is a setting such as mscale.
    """
    return 0.1 * weight * math.log(max(1.0, settings.get_float("factor"))) + 1


def yarn_attention_factor(settings: CheckpointConfig) -> float:
    """Return the factor by which transformers multiplies the sines and cosines of a yarn model
    (modeling_rope_utils).
    """
    if "attention_factor" in settings.values:
        return settings.get_float("attention_factor")
    if settings.values.get("mscale") and settings.values.get("mscale_all_dim"):
        return yarn_scale(settings, settings.get_float("mscale")) / yarn_scale(
            settings, settings.get_float("mscale_all_dim")
        )
    return yarn_scale(settings)


def has_other_ramp(settings: CheckpointConfig, allow_rounded_ramp: bool) -> bool:
    """Return whether a yarn model's ramp, between scaled and unscaled dimensions, differs from
    llama.cpp's fixed ramp (beta_fast 32, beta_slow 1, truncated). With `allow_rounded_ramp`, the
    setting truncate is not compared.
    """
    values = settings.values
    truncated = allow_rounded_ramp or values.get("truncate", True)
    return (values.get("beta_fast") or 32, values.get("beta_slow") or 1, truncated) != (32, 1, True)


def yarn_ramp_notes(config: CheckpointConfig) -> list[str]:
    """Return a note if a yarn model does not round the ends of its ramp to whole dimensions.
    llama.cpp always rounds them.
    """
    settings = rope_settings(config).values
    if settings["rope_type"] != "yarn" or settings.get("truncate", True):
        return []
    return [
        "llama.cpp rounds the ends of this model's yarn ramp, and transformers does not: "
        "answers differ slightly"
    ]


def llama3_rope_factors(config: CheckpointConfig) -> "dict[str, F32]":
    """Return Llama 3's frequency factors as the tensor rope_freqs.weight `[head_dim / 2]`. For
    other rope types, return no tensors.

    Raises UserError if the settings contradict each other.
    """
    import numpy as np

    settings = rope_settings(config)
    if settings.values["rope_type"] != "llama3":
        return {}
    head_dim = layout.head_counts(config)[2]
    factor, low, high = (
        settings.get_float("factor", 8.0),
        settings.get_float("low_freq_factor", 1.0),
        settings.get_float("high_freq_factor", 4.0),
    )
    original = settings.get_float(ORIGINAL_LENGTH_KEY)
    if low > high:
        raise UserError(
            f"{config.location}: low_freq_factor must not be above high_freq_factor",
            hint="fetch it again",
        )
    factors = []
    for pair in range(head_dim // 2):
        wavelength = 2 * math.pi * settings.get_float("rope_theta") ** (2 * pair / head_dim)
        if wavelength < original / high:
            factors.append(1.0)
        elif wavelength > original / low:
            factors.append(factor)
        else:
            # Llama 4 Scout has no factors between low and high, which are equal there
            smooth = (original / wavelength - low) / (high - low) if high > low else 1.0
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return {"rope_freqs.weight": np.array(factors, np.float32)}


# For families whose checkpoints store the two halves of a rotary head one after the other, but for
# which llama.cpp rotates interleaved pairs (llama_model_rope_type, src/llama-model.cpp). Biases are
# reordered like their weights.
INTERLEAVE_OPS: dict[str, TensorOp] = {
    "attn_q": lambda config, tensor: tensor_views.pick_rows(
        tensor, rope_row_order(layout.head_counts(config)[0], layout.head_counts(config)[2])
    ),
    "attn_k": lambda config, tensor: tensor_views.pick_rows(
        tensor, rope_row_order(layout.head_counts(config)[1], layout.head_counts(config)[2])
    ),
}
