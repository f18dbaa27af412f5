"""Qwen3-Next: both kinds of layers, and norms that are stored minus one."""

from typing import Any

from torch import nn

from tests.quant.families import Case
from tests.quant.families.llama import YARN

LINEAR: dict[str, Any] = {
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "intermediate_size": 256,
}
MOE: dict[str, Any] = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 96,
    "shared_expert_intermediate_size": 64,
    "norm_topk_prob": True,
}


def keep_inner_norms(model: nn.Module) -> None:
    """Give the norms inside linear attention weights around 1. All others are stored minus one."""
    for name, value in model.named_parameters():
        if name.endswith("linear_attn.norm.weight"):
            value.add_(1.0)


def case(name: str, original: bool = True, **settings: Any) -> Case:
    return Case(
        f"qwen3next, {name}",
        "Qwen3NextForCausalLM",
        LINEAR | MOE | settings,
        norm=0.0,
        change=keep_inner_norms,
        original=original,
    )


CASES = [
    case("separate experts"),
    case(
        "fused experts, tied, as many key heads as value heads",
        original=False,
        tie_word_embeddings=True,
        linear_num_key_heads=4,
        linear_num_value_heads=4,
    ),
    case(
        "other order of layers, half of each head rotary, yarn",
        layer_types=["full_attention", "linear_attention", "linear_attention", "full_attention"],
        rope_parameters=YARN | {"partial_rotary_factor": 0.5},
    ),
]
