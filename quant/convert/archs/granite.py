"""Granite (dense): Llama with multipliers for the embedding, the attention scores, the residuals
and the logits.

Follows GraniteModel of llama.cpp (conversion/granite.py, src/models/granite.cpp), except that
head_dim is read from config.json if it is there, as in transformers.
"""

from dataclasses import replace

from quant.checkpoint.config import CheckpointConfig
from quant.convert.archs import llama
from quant.convert.parts import checks, rope
from quant.convert.parts.base import ArchKey


def check(config: CheckpointConfig) -> list[str]:
    """Raise UserError for settings that llama.cpp's granite computes differently. Return
    no notes.
    """
    checks.raise_problems(
        config, checks.common_problems(config, rope_types=rope.ROPE_TYPES_WITH_FACTORS)
    )
    return []


def keys(config: CheckpointConfig) -> list[ArchKey]:
    """Return Llama's metadata keys, then those of the multipliers.

    The attention scale is always written, because llama.cpp would otherwise use 1 / sqrt(head_dim).
    """
    return [
        *llama.keys(config),
        ArchKey("attention.scale", "float32", config.get_float("attention_multiplier", 1.0)),
        ArchKey("embedding_scale", "float32", config.get_float("embedding_multiplier", 1.0)),
        ArchKey("residual_scale", "float32", config.get_float("residual_multiplier", 1.0)),
        ArchKey("logit_scale", "float32", config.get_float("logits_scaling", 1.0)),
    ]


GRANITE = replace(
    llama.LLAMA,
    name="granite",
    kind="GRANITE",
    hf=("GraniteForCausalLM",),
    keys=keys,
    check=check,
    defaults={},
)

ARCHS = (GRANITE,)
