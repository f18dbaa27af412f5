"""Seed-OSS: grouped-query attention with biases of queries, keys and values.

Follows SeedOssModel of llama.cpp (conversion/olmo.py, src/models/seed-oss.cpp), where the norm
before the feed-forward has the name post_attention_norm.
"""

from quant.checkpoint.config import CheckpointConfig
from quant.convert.parts import block_tensors, checks, metadata
from quant.convert.parts.base import Arch, Shapes

DEFAULTS = {  # defaults of transformers' SeedOssConfig
    "num_key_value_heads": 8,
    "head_dim": 128,
    "attention_bias": True,
}


def check(config: CheckpointConfig) -> list[str]:
    """Raise UserError for settings that llama.cpp's seed_oss computes differently. Return
    no notes.
    """
    checks.raise_problems(
        config,
        [
            *checks.common_problems(config),
            checks.problem_biases(config, "attention_out_bias", "mlp_bias"),
        ],
    )
    return []


def required_shapes(config: CheckpointConfig) -> Shapes:
    """Return the shapes of all tensors that a converted model must have, rows first, by
    GGUF name.
    """
    biases = block_tensors.qkv_bias_shapes(config) if config.get_bool("attention_bias") else {}
    feed_forward = block_tensors.feed_forward_shapes(config)
    feed_forward["post_attention_norm.weight"] = feed_forward.pop("ffn_norm.weight")
    return block_tensors.embedding_and_head(config) | block_tensors.repeat_for_blocks(
        config, block_tensors.attention_shapes(config), biases, feed_forward
    )


SEED_OSS = Arch(
    name="seed_oss",
    kind="SEED_OSS",
    hf=("SeedOssForCausalLM",),
    keys=metadata.common_keys,
    required_shapes=required_shapes,
    check=check,
    defaults=DEFAULTS,
)

ARCHS = (SEED_OSS,)
