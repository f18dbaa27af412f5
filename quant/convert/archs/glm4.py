"""GLM 4 (0414): rotary pairs in a part of each head, norms before and after attention and
feed-forward, and gate and up in one matrix.

Follows conversion/glm.py and src/models/glm4.cpp of llama.cpp. The rows of queries and keys keep
their order, because checkpoint and llama.cpp both use interleaved pairs.
"""

from quant.checkpoint.config import CheckpointConfig
from quant.convert.parts import block_tensors, checks, metadata, rope
from quant.convert.parts.base import Arch, ArchKey, Shapes

DEFAULTS = {  # defaults of transformers' Glm4Config
    "num_key_value_heads": 2,
    "head_dim": 128,
    "partial_rotary_factor": 0.5,
    "attention_bias": True,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1.5625e-7,
}


def check(config: CheckpointConfig) -> list[str]:
    """Raise UserError for settings that llama.cpp's glm4 computes differently. Return no notes."""
    checks.raise_problems(
        config,
        [
            *checks.common_problems(
                config, rope_types=("default", "linear", "yarn"), allow_partial_rotary=True
            ),
            (config.values.get("num_nextn_predict_layers"), "it predicts several tokens at once"),
        ],
    )
    return []


def keys(config: CheckpointConfig) -> list[ArchKey]:
    """Return the common metadata keys and the rotary width of a head."""
    return [
        *metadata.common_keys(config),
        ArchKey("rope.dimension_count", "uint32", rope.rotary_width(config)),
    ]


def required_shapes(config: CheckpointConfig) -> Shapes:
    """Return the shapes of all tensors that a converted model must have, rows first, by
    GGUF name.
    """
    biases = block_tensors.qkv_bias_shapes(config) if config.get_bool("attention_bias") else {}
    block_shapes = (
        block_tensors.attention_shapes(config),
        biases,
        block_tensors.fused_feed_forward_shapes(config),
        block_tensors.post_norm_shapes(config),
    )
    return block_tensors.embedding_and_head(config) | block_tensors.repeat_for_blocks(
        config, *block_shapes
    )


GLM4 = Arch(
    name="glm4",
    kind="GLM4",
    hf=("Glm4ForCausalLM",),
    keys=keys,
    required_shapes=required_shapes,
    check=check,
    defaults=DEFAULTS,
)

ARCHS = (GLM4,)
