"""Mixtral: Mistral with experts as its feed-forward. Its llama.cpp architecture is llama.

Follows MixtralModel of llama.cpp (conversion/llama.py, src/models/llama.cpp).
"""

from dataclasses import replace

from quant.checkpoint.config import CheckpointConfig
from quant.convert.archs import llama
from quant.convert.parts import block_tensors, checks, experts, rope
from quant.convert.parts.base import ArchKey, Shapes, no_tensors


def check(config: CheckpointConfig) -> list[str]:
    """Raise UserError for settings that llama.cpp's llama computes differently; return notes for
    the user.
    """
    checks.raise_problems(
        config,
        [
            *checks.common_problems(config, rope_types=rope.ROPE_TYPES_WITH_FACTORS),
            *experts.expert_problems(config),
        ],
    )
    return checks.window_notes(config, "llama")


def keys(config: CheckpointConfig) -> list[ArchKey]:
    """Return Llama's metadata keys, then those of the experts."""
    return [*llama.keys(config), *experts.expert_keys(config)]


def required_shapes(config: CheckpointConfig) -> Shapes:
    """Return the shapes of all tensors that a converted model must have, rows first, by
    GGUF name.
    """
    return block_tensors.embedding_and_head(config) | block_tensors.repeat_for_blocks(
        config,
        block_tensors.attention_shapes(config),
        experts.sparse_feed_forward_shapes(config, config.get_int("intermediate_size")),
    )


MIXTRAL = replace(
    llama.LLAMA,
    hf=("MixtralForCausalLM",),
    keys=keys,
    required_shapes=required_shapes,
    optional_shapes=no_tensors,
    check=check,
    prepare=experts.stack_experts,
    defaults={
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
)

ARCHS = (MIXTRAL,)
