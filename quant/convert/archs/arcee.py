"""Arcee (AFM): Llama with a feed-forward of two matrices and a squared ReLU, without a gate.

Follows ArceeModel of llama.cpp (conversion/llama.py, src/models/arcee.cpp).
"""

from dataclasses import replace

from quant.checkpoint.config import CheckpointConfig
from quant.convert.archs import blocks, llama
from quant.convert.archs.base import Shapes, no_tensors


def check(config: CheckpointConfig) -> list[str]:
    """Raise UserError for settings that llama.cpp's arcee computes differently. Return no notes."""
    blocks.raise_problems(
        config,
        [
            *blocks.common_problems(
                config, rope_types=blocks.ROPE_TYPES_WITH_FACTORS, activations=("relu2",)
            ),
            blocks.problem_biases(config, "attention_bias", "mlp_bias"),
        ],
    )
    return []


def required_shapes(config: CheckpointConfig) -> Shapes:
    """Return the shapes of all tensors that a converted model must have, rows first, by
    GGUF name.
    """
    return blocks.embedding_and_head(config) | blocks.repeat_for_blocks(
        config, blocks.attention_shapes(config), blocks.plain_feed_forward_shapes(config)
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
