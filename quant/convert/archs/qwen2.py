"""Qwen2 and Qwen2.5: Llama with biases of queries, keys and values. The rows of rotary heads keep
their order, because llama.cpp also rotates two halves here.

Follows Qwen2Model of llama.cpp (conversion/qwen.py, src/models/qwen2.cpp).
"""

from quant.checkpoint.config import CheckpointConfig
from quant.convert.parts import block_tensors, checks, layout, metadata
from quant.convert.parts.base import Arch, Shapes


def check(config: CheckpointConfig) -> list[str]:
    """Raise UserError for settings that llama.cpp's qwen2 computes differently. Return no notes."""
    checks.raise_problems(
        config,
        [
            *checks.common_problems(config),
            problem_window(config),
            checks.problem_head_width(config),
        ],
    )
    return []


def problem_window(config: CheckpointConfig) -> tuple[object, str]:
    """Return the problem (condition, text) that the last layers have a sliding window. Used for
    Qwen2 and Qwen3.
    """
    return layout.has_sliding_window(
        config, lambda layer, first: layer >= first
    ), "some of its layers have a sliding window"


def required_shapes(config: CheckpointConfig) -> Shapes:
    """Return the shapes of all tensors that a converted model must have, rows first, by
    GGUF name.
    """
    return block_tensors.embedding_and_head(config) | block_tensors.repeat_for_blocks(
        config,
        block_tensors.attention_shapes(config),
        block_tensors.qkv_bias_shapes(config),
        block_tensors.feed_forward_shapes(config),
    )


QWEN2 = Arch(
    name="qwen2",
    kind="QWEN2",
    hf=("Qwen2ForCausalLM",),
    keys=metadata.common_keys,
    required_shapes=required_shapes,
    check=check,
    defaults={"sliding_window": 4096},
)

ARCHS = (QWEN2,)
