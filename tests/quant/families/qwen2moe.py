"""Qwen1.5-MoE and Qwen2-MoE: experts, and a shared expert with another hidden size."""

from tests.quant.families import Case
from tests.quant.families.llama import YARN, old_spelling

MOE = {
    "head_dim": None,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 192,
    "shared_expert_intermediate_size": 320,
}

CASES = [
    Case("qwen2moe, separate experts", "Qwen2MoeForCausalLM", MOE),
    Case(
        "qwen2moe, fused experts, 4 query heads per key head",
        "Qwen2MoeForCausalLM",
        MOE | {"num_key_value_heads": 2},
        original=False,
    ),
    Case("qwen2moe, tied", "Qwen2MoeForCausalLM", MOE | {"tie_word_embeddings": True}),
    Case("qwen2moe, no biases", "Qwen2MoeForCausalLM", MOE | {"qkv_bias": False}),
    Case(
        "qwen2moe, yarn rope, old spelling",
        "Qwen2MoeForCausalLM",
        MOE | {"rope_parameters": YARN},
        config=old_spelling,
    ),
]
