"""Qwen3: Qwen2 without biases of queries, keys and values, with a norm of each query head and each
key head, and with heads of any width.

Follows Qwen3Model of llama.cpp (conversion/qwen.py, src/models/qwen3.cpp). Rerankers have a
different head. They are refused, because their class name is not in ARCHS.
"""

from dataclasses import replace

from quant.checkpoint.config import CheckpointConfig
from quant.convert.archs.qwen2 import QWEN2, problem_window
from quant.convert.parts import block_tensors, checks
from quant.convert.parts.base import Shapes


def check(config: CheckpointConfig) -> list[str]:
    """Raise UserError for settings that llama.cpp's qwen3 computes differently. attention_bias is
    refused because llama.cpp does not add a bias to the attention's output. Return no notes.
    """
    checks.raise_problems(
        config,
        [
            *checks.common_problems(config),
            problem_window(config),
            checks.problem_biases(config, "attention_bias"),
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
        block_tensors.head_norm_shapes(config),
        block_tensors.feed_forward_shapes(config),
    )


QWEN3 = replace(
    QWEN2,
    name="qwen3",
    kind="QWEN3",
    hf=("Qwen3ForCausalLM",),
    required_shapes=required_shapes,
    check=check,
    defaults={"sliding_window": 4096, "head_dim": 128},
)

ARCHS = (QWEN3,)
