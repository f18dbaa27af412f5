"""Qwen1.5-MoE and Qwen2-MoE: experts in every block, and one shared expert with a gate.

Follows Qwen2MoeModel of llama.cpp (conversion/qwen.py, src/models/qwen2moe.cpp).
"""

from quant.checkpoint.config import CheckpointConfig
from quant.convert.parts import block_tensors, checks, experts, layout, metadata
from quant.convert.parts.base import Arch, ArchKey, Shapes

DEFAULTS = {
    "sliding_window": 4096,
    "decoder_sparse_step": 1,
    "num_experts_per_tok": 4,
    "qkv_bias": True,
}


def check(config: CheckpointConfig) -> list[str]:
    """Raise UserError for settings that llama.cpp's qwen2moe computes differently. A true
    norm_topk_prob is refused because llama.cpp never normalizes the weights of the chosen experts.
    Return no notes.
    """
    checks.raise_problems(
        config,
        [
            *checks.common_problems(config),
            *experts.expert_problems(config),
            *problem_dense_blocks(config),
            checks.problem_head_width(config),
            (config.get_bool("norm_topk_prob"), "norm_topk_prob is true"),
            (
                layout.has_sliding_window(
                    config, lambda layer, end: layer % 2 == 0 and layer < end
                ),
                "some of its layers have a sliding window",
            ),
        ],
    )
    return []


def problem_dense_blocks(config: CheckpointConfig) -> list[tuple[object, str]]:
    """Return the problems (condition, text) that some blocks have no experts, which llama.cpp does
    not support.
    """
    return [
        (config.values.get("mlp_only_layers"), "the layers in mlp_only_layers have no experts"),
        (
            config.get_int("decoder_sparse_step", default=1) != 1,
            "decoder_sparse_step leaves blocks without experts",
        ),
    ]


def keys(config: CheckpointConfig) -> list[ArchKey]:
    """Return the common metadata keys, then those of the experts."""
    return [*metadata.common_keys(config), *expert_keys(config)]


def expert_keys(config: CheckpointConfig) -> list[ArchKey]:
    """Return the metadata keys of the experts and of the shared expert."""
    return [
        *experts.expert_keys(config),
        ArchKey("expert_feed_forward_length", "uint32", config.get_int("moe_intermediate_size")),
        ArchKey(
            "expert_shared_feed_forward_length",
            "uint32",
            config.get_int("shared_expert_intermediate_size"),
        ),
    ]


def gated_expert_shapes(config: CheckpointConfig) -> Shapes:
    """Return the shapes of one block's experts, of its shared expert and of the gate of the latter,
    by role.
    """
    return {
        **experts.expert_shapes(config, config.get_int("moe_intermediate_size")),
        **experts.shared_expert_shapes(config, config.get_int("shared_expert_intermediate_size")),
        "ffn_gate_inp_shexp.weight": (1, config.get_int("hidden_size")),
    }


def required_shapes(config: CheckpointConfig) -> Shapes:
    """Return the shapes of all tensors that a converted model must have, rows first, by
    GGUF name.
    """
    return block_tensors.embedding_and_head(config) | block_tensors.repeat_for_blocks(
        config,
        block_tensors.attention_shapes(config),
        block_tensors.qkv_bias_shapes(config) if config.get_bool("qkv_bias", True) else {},
        {"ffn_norm.weight": (config.get_int("hidden_size"),)},
        gated_expert_shapes(config),
    )


QWEN2MOE = Arch(
    name="qwen2moe",
    kind="QWEN2MOE",
    hf=("Qwen2MoeForCausalLM",),
    keys=keys,
    required_shapes=required_shapes,
    check=check,
    prepare=experts.stack_experts,
    defaults=DEFAULTS,
    needs_head=True,
)

ARCHS = (QWEN2MOE,)
