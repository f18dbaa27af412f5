"""Jais 2: biases in all matrices, norms that subtract the mean, and a feed-forward of two matrices
with a squared ReLU.

Follows Jais2Model of llama.cpp (conversion/jais.py, src/models/jais2.cpp).
"""

from dataclasses import replace

from quant.checkpoint.config import CheckpointConfig
from quant.convert.archs import starcoder2
from quant.convert.parts import checks, layout, metadata
from quant.convert.parts.base import ArchKey

DEFAULTS = {"layer_norm_eps": 1e-5, "attention_bias": True, "mlp_bias": True}


def check(config: CheckpointConfig) -> list[str]:
    """Raise UserError for settings that llama.cpp's jais2 computes differently. Return no notes."""
    has_biases = config.get_bool("attention_bias") and config.get_bool("mlp_bias")
    checks.raise_problems(
        config,
        [
            *checks.common_problems(config, activations=("relu2",)),
            (not has_biases, "it has no biases"),
        ],
    )
    return []


def keys(config: CheckpointConfig) -> list[ArchKey]:
    """Return the common metadata keys and the rotary width of a head, which is the whole head."""
    return [
        *metadata.layer_norm_keys(config, config.get_float("layer_norm_eps")),
        ArchKey("rope.dimension_count", "uint32", layout.head_counts(config)[2]),
    ]


JAIS2 = replace(
    starcoder2.STARCODER2,
    name="jais2",
    kind="JAIS2",
    hf=("Jais2ForCausalLM",),
    keys=keys,
    check=check,
    defaults=DEFAULTS,
)

ARCHS = (JAIS2,)
