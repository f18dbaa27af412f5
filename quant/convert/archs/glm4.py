"""GLM 4 (0414): rotary pairs in a part of each head, norms around attention and feed-forward, gate
and up in one matrix.

Follows conversion/glm.py and src/models/glm4.cpp of llama.cpp. The checkpoint stores interleaved
pairs, so the rows of queries and keys keep their order.
"""

from quant.checkpoint.config import Config
from quant.convert.archs import blocks
from quant.convert.archs.base import Arch, Key, Shapes

DEFAULTS = {  # defaults of transformers' Glm4Config
    "num_key_value_heads": 2,
    "head_dim": 128,
    "partial_rotary_factor": 0.5,
    "attention_bias": True,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1.5625e-7,
}


def check(config: Config) -> list[str]:
    """Raise UserError for settings that llama.cpp's glm4 computes differently."""
    blocks.refuse(
        config,
        [
            *blocks.problems(config, ropes=("default", "linear", "yarn"), partial=True),
            (config.values.get("num_nextn_predict_layers"), "it predicts several tokens at once"),
        ],
    )
    return []


def keys(config: Config) -> list[Key]:
    """Return the common keys and the rotary width of a head."""
    return [*blocks.keys(config), Key("rope.dimension_count", "uint32", blocks.rotary(config))]


def expected(config: Config) -> Shapes:
    """Return the required tensors with their shapes, rows first."""
    biases = blocks.biases(config) if config.flag("attention_bias") else {}
    parts = blocks.attention(config), biases, blocks.fused(config), blocks.post_norms(config)
    return blocks.ends(config) | blocks.blocks(config, *parts)


GLM4 = Arch(
    name="glm4",
    kind="GLM4",
    hf=("Glm4ForCausalLM",),
    keys=keys,
    expected=expected,
    check=check,
    defaults=DEFAULTS,
)

ARCHS = (GLM4,)
