"""Arcee (AFM): Llama with a feed-forward of two matrices and a squared ReLU, without a gate.

Follows ArceeModel of llama.cpp (conversion/llama.py, src/models/arcee.cpp).
"""

from dataclasses import replace

from quant.checkpoint.config import CheckpointConfig
from quant.convert.archs import llama
from quant.convert.parts import block_tensors, checks, rope
from quant.convert.parts.base import Shapes, no_tensors


def check(config: CheckpointConfig) -> list[str]:
    """Raise UserError for settings that llama.cpp's arcee computes differently. Return no notes."""
    checks.raise_problems(
        config,
        [
            *checks.common_problems(
                config, rope_types=rope.ROPE_TYPES_WITH_FACTORS, activations=("relu2",)
            ),
            checks.problem_biases(config, "attention_bias", "mlp_bias"),
        ],
    )
    return []


def required_shapes(config: CheckpointConfig) -> Shapes:
    """Return the shapes of all tensors that a converted model must have, rows first, by
    GGUF name.
    """
    return block_tensors.embedding_and_head(config) | block_tensors.repeat_for_blocks(
        config,
        block_tensors.attention_shapes(config),
        block_tensors.plain_feed_forward_shapes(config),
    )


ARCEE = replace(
    llama.LLAMA,
    name="arcee",
    kind="ARCEE",
    hf=("ArceeForCausalLM",),
    check=check,
    required_shapes=required_shapes,
    optional_shapes=no_tensors,
    defaults={"rms_norm_eps": 1e-5},
)

ARCHS = (ARCEE,)
