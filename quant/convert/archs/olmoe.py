"""OLMoE: experts in every block, one norm over all query heads together, and one norm over all key
heads together.

Follows OlmoeModel of llama.cpp (conversion/olmo.py, src/models/olmoe.cpp). llama.cpp requires one
key head for each query head, and uses the weights of the chosen experts as they are. The converter
of llama.cpp always writes an eps of 1e-5; here it is the one of config.json.
"""

from quant.checkpoint.config import CheckpointConfig
from quant.convert.parts import block_tensors, checks, experts, metadata
from quant.convert.parts.base import Arch, Shapes

DEFAULTS = {"rms_norm_eps": 1e-5, "num_experts": 64, "num_experts_per_tok": 8}


def check(config: CheckpointConfig) -> list[str]:
    """Raise UserError for settings that llama.cpp's olmoe computes differently. Return no notes."""
    checks.raise_problems(
        config,
        [
            *checks.common_problems(config),
            *experts.expert_problems(config),
            checks.problem_head_width(config),
            checks.problem_biases(config, "attention_bias"),
            checks.problem_shared_keys(config),
            (config.values.get("clip_qkv") is not None, "its attention is clipped (clip_qkv)"),
            (config.get_bool("norm_topk_prob"), "norm_topk_prob is true"),
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
        block_tensors.joint_head_norm_shapes(config),
        experts.sparse_feed_forward_shapes(config, config.get_int("intermediate_size")),
    )


OLMOE = Arch(
    name="olmoe",
    kind="OLMOE",
    hf=("OlmoeForCausalLM",),
    keys=lambda config: [*metadata.common_keys(config), *experts.expert_keys(config)],
    required_shapes=required_shapes,
    check=check,
    prepare=experts.stack_experts,
    defaults=DEFAULTS,
    needs_head=True,
)

ARCHS = (OLMOE,)
