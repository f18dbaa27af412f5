"""Qwen3-MoE."""

from tests.quant.families import Case
from tests.quant.families.llama import YARN, old_spelling

MOE = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 192,
    "norm_topk_prob": True,
}

CASES = [
    Case("qwen3moe, separate experts", "Qwen3MoeForCausalLM", MOE),
    Case(
        "qwen3moe, fused experts, tied, 4 query heads per key head",
        "Qwen3MoeForCausalLM",
        MOE | {"tie_word_embeddings": True, "num_key_value_heads": 2},
        original=False,
    ),
    Case(
        "qwen3moe, yarn rope, old spelling",
        "Qwen3MoeForCausalLM",
        MOE | {"rope_parameters": YARN},
        config=old_spelling,
    ),
]
