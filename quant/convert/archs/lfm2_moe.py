"""LFM2 with experts: dense layers, then layers whose experts are chosen by sigmoid and a bias.

Follows conversion/lfm2.py and src/models/lfm2moe.cpp of llama.cpp.
"""

from dataclasses import replace
from typing import Any

from quant.checkpoint.config import CheckpointConfig
from quant.checkpoint.safetensors import Tensors
from quant.convert.archs import lfm2
from quant.convert.parts import block_tensors, checks, experts, layout
from quant.convert.parts.base import ArchKey, Shapes

DEFAULTS: dict[str, Any] = {  # defaults of transformers' Lfm2MoeConfig
    "vocab_size": 65536,
    "hidden_size": 2048,
    "intermediate_size": 7168,
    "moe_intermediate_size": 1792,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 128000,
    "norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "conv_L_cache": 3,
    "num_dense_layers": 2,
    "num_experts_per_tok": 4,
    "num_experts": 32,
    "use_expert_bias": True,
    "routed_scaling_factor": 1.0,
    "norm_topk_prob": True,
}


def dense_layer_count(config: CheckpointConfig) -> int:
    """Return the number of layers without experts. These are the first layers."""
    count = config.get_int("num_dense_layers") if config.values.get("num_dense_layers") else 0
    return min(count, layout.layer_count(config))


def check(config: CheckpointConfig) -> list[str]:
    """Raise UserError for settings that llama.cpp's lfm2moe computes differently. Return no
    notes.
    """
    scale = config.values.get("routed_scaling_factor")
    checks.raise_problems(
        config,
        [
            *lfm2.problems(config),
            *experts.expert_problems(config),
            (not config.get_bool("use_expert_bias"), "its router has no bias (use_expert_bias)"),
            (not config.get_bool("norm_topk_prob"), "norm_topk_prob is false"),
            (scale != 1, f"its routed_scaling_factor is {scale}; llama.cpp computes with 1"),
        ],
    )
    return []


def keys(config: CheckpointConfig) -> list[ArchKey]:
    """Return the metadata keys of LFM2, then those of the experts."""
    return [
        *lfm2.keys(config),
        *experts.expert_keys(config),
        ArchKey("expert_feed_forward_length", "uint32", config.get_int("moe_intermediate_size")),
        ArchKey("leading_dense_block_count", "uint32", dense_layer_count(config)),
        ArchKey("expert_gating_func", "uint32", experts.SIGMOID),
    ]


def feed_forward_shapes(config: CheckpointConfig, layer: int) -> Shapes:
    """Return the shapes of the feed-forward, or of the experts, of the block with this number, by
    role.
    """
    if layer < dense_layer_count(config):
        return block_tensors.feed_forward_shapes(config)
    return {
        **experts.sparse_feed_forward_shapes(config, config.get_int("moe_intermediate_size")),
        "exp_probs_b.bias": (experts.expert_count(config),),
    }


def prepare(config: CheckpointConfig, tensors: Tensors) -> Tensors:
    """Return the tensors with convolutions as matrices, experts stacked, and biases of routers
    under names that end in .bias.
    """
    return block_tensors.rename_tensors(
        experts.stack_experts(config, lfm2.prepare(config, tensors)),
        lambda name: f"{name}.bias" if name.endswith(".expert_bias") else name,
    )


LFM2_MOE = replace(
    lfm2.LFM2,
    name="lfm2moe",
    kind="LFM2MOE",
    hf=("Lfm2MoeForCausalLM",),
    keys=keys,
    required_shapes=lambda config: lfm2.required_shapes(config, feed_forward_shapes),
    check=check,
    defaults=DEFAULTS,
    prepare=prepare,
    names={
        "feed_forward.expert_bias": "exp_probs_b",
        "feed_forward.experts.gate_proj": "ffn_gate_exps",
        "feed_forward.experts.up_proj": "ffn_up_exps",
        "feed_forward.experts.down_proj": "ffn_down_exps",
        "feed_forward.experts.w1": "ffn_gate_exps",
        "feed_forward.experts.w3": "ffn_up_exps",
        "feed_forward.experts.w2": "ffn_down_exps",
    },
)

ARCHS = (LFM2_MOE,)
