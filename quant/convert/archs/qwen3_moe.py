"""Qwen3-MoE: Qwen3's attention with experts in every block and no shared expert.

Follows Qwen3MoeModel of llama.cpp (conversion/qwen.py, src/models/qwen3moe.cpp).
"""

from quant.checkpoint.config import CheckpointConfig
from quant.convert.archs.qwen2_moe import problem_dense_blocks
from quant.convert.parts import block_tensors, checks, experts, layout, metadata
from quant.convert.parts.base import Arch, ArchKey, Shapes


def check(config: CheckpointConfig) -> list[str]:
    """Raise UserError for settings that llama.cpp's qwen3moe computes differently. A false
    norm_topk_prob is refused because llama.cpp always normalizes the weights of the chosen experts.
    Return no notes.
    """
    checks.raise_problems(
        config,
        [
            *checks.common_problems(config),
            *experts.expert_problems(config),
            *problem_dense_blocks(config),
            checks.problem_biases(config, "attention_bias"),
            (not config.get_bool("norm_topk_prob"), "norm_topk_prob is false"),
            (
                layout.has_sliding_window(config, lambda *_: True),
                "its layers have a sliding window",
            ),
        ],
    )
    return []


def keys(config: CheckpointConfig) -> list[ArchKey]:
    """Return the common metadata keys, then those of the experts."""
    width = config.get_int("moe_intermediate_size")
    return [
        *metadata.common_keys(config),
        *experts.expert_keys(config),
        ArchKey("expert_feed_forward_length", "uint32", width),
    ]


def required_shapes(config: CheckpointConfig) -> Shapes:
    """Return the shapes of all tensors that a converted model must have, rows first, by
    GGUF name.
    """
    return block_tensors.embedding_and_head(config) | block_tensors.repeat_for_blocks(
        config,
        block_tensors.attention_shapes(config),
        block_tensors.head_norm_shapes(config),
        experts.sparse_feed_forward_shapes(config, config.get_int("moe_intermediate_size")),
    )


QWEN3MOE = Arch(
    name="qwen3moe",
    kind="QWEN3MOE",
    hf=("Qwen3MoeForCausalLM",),
    keys=keys,
    required_shapes=required_shapes,
    check=check,
    prepare=experts.stack_experts,
    defaults={"sliding_window": 4096, "num_experts_per_tok": 8, "num_experts": 128},
)

ARCHS = (QWEN3MOE,)
