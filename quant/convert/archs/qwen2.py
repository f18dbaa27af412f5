"""Qwen2 and Qwen2.5: Llama with biases of queries, keys and values. The rows of rotary heads keep
their order, because llama.cpp also rotates two halves here.

Follows Qwen2Model of llama.cpp (conversion/qwen.py, src/models/qwen2.cpp).
"""

from quant.checkpoint.config import CheckpointConfig
from quant.convert.archs import blocks
from quant.convert.archs.base import Arch, Shapes


def check(config: CheckpointConfig) -> list[str]:
    """Raise UserError for settings that llama.cpp's qwen2 computes differently. Return no notes."""
    blocks.raise_problems(
        config,
        [
            *blocks.common_problems(config),
            problem_window(config),
            blocks.problem_head_width(config),
        ],
    )
    return []


def problem_window(config: CheckpointConfig) -> tuple[object, str]:
    """Return the problem (condition, text) that the last layers have a sliding window. Used for
    Qwen2 and Qwen3.
    """
    return blocks.has_sliding_window(
        config, lambda layer, first: layer >= first
    ), "some of its layers have a sliding window"


def required_shapes(config: CheckpointConfig) -> Shapes:
    """Return the shapes of all tensors that a converted model must have, rows first, by
    GGUF name.
    """
    return blocks.embedding_and_head(config) | blocks.repeat_for_blocks(
        config,
        blocks.attention_shapes(config),
        blocks.qkv_bias_shapes(config),
        blocks.feed_forward_shapes(config),
    )


QWEN2 = Arch(
    name="qwen2",
    kind="QWEN2",
    hf=("Qwen2ForCausalLM",),
    keys=blocks.common_keys,
    required_shapes=required_shapes,
    check=check,
    defaults={"sliding_window": 4096},
)

ARCHS = (QWEN2,)
