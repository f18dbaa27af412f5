"""OLMo 1: a Llama with norms that subtract the mean and have no weights. Queries, keys and values
may be clipped.

Follows OlmoModel of llama.cpp (conversion/olmo.py, src/models/olmo.cpp).
"""

from dataclasses import replace

from quant.checkpoint.config import CheckpointConfig
from quant.convert.archs import llama
from quant.convert.parts import checks, metadata
from quant.convert.parts.base import ArchKey, Shapes, no_tensors

NORM_EPS = 1e-5  # in transformers, whatever config.json says


def check(config: CheckpointConfig) -> list[str]:
    """Raise UserError for settings that llama.cpp's olmo computes differently. Return no notes."""
    checks.raise_problems(
        config,
        [
            *checks.common_problems(config),
            checks.problem_head_width(config),
            checks.problem_biases(config, "attention_bias"),
        ],
    )
    return []


def keys(config: CheckpointConfig) -> list[ArchKey]:
    """Return the common metadata keys, then the largest size of queries, keys and values, if they
    are clipped.
    """
    entries = metadata.layer_norm_keys(config, NORM_EPS)
    if config.values.get("clip_qkv") is not None:
        entries.append(ArchKey("attention.clamp_kqv", "float32", config.get_float("clip_qkv")))
    return entries


def required_shapes(config: CheckpointConfig) -> Shapes:
    """Return the shapes of all tensors that a converted model must have, rows first, by
    GGUF name.
    """
    return {
        name: shape
        for name, shape in llama.required_shapes(config).items()
        if not name.endswith("_norm.weight")
    }


OLMO = replace(
    llama.LLAMA,
    name="olmo",
    kind="OLMO",
    hf=("OlmoForCausalLM",),
    keys=keys,
    required_shapes=required_shapes,
    check=check,
    optional_shapes=no_tensors,
    extra_tensors=no_tensors,
)

ARCHS = (OLMO,)
