"""Granite (dense): Llama with multipliers for embedding, attention, residual and logits.

Follows GraniteModel of llama.cpp (conversion/granite.py, src/models/granite.cpp), except that a
head_dim in the config is honored, as in transformers.
"""

from dataclasses import replace

from quant.checkpoint.config import Config
from quant.convert.archs import blocks, llama
from quant.convert.archs.base import Key


def check(config: Config) -> list[str]:
    """Raise UserError for settings that llama.cpp's granite computes differently."""
    blocks.refuse(config, blocks.problems(config, ropes=blocks.FACTORED))
    return []


def keys(config: Config) -> list[Key]:
    """Return Llama's keys and the multipliers.

    The attention scale is always written, because llama.cpp's default is 1 / sqrt(head_dim).
    """
    return [
        *llama.keys(config),
        Key("attention.scale", "float32", config.real("attention_multiplier", 1.0)),
        Key("embedding_scale", "float32", config.real("embedding_multiplier", 1.0)),
        Key("residual_scale", "float32", config.real("residual_multiplier", 1.0)),
        Key("logit_scale", "float32", config.real("logits_scaling", 1.0)),
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
