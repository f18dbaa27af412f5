"""Qwen3: heads wider than hidden_size / heads."""

from tests.quant.families import Case
from tests.quant.families.llama import YARN, old_spelling

CASES = [
    Case("qwen3, untied", "Qwen3ForCausalLM"),
    Case(
        "qwen3, tied, 4 query heads per key head",
        "Qwen3ForCausalLM",
        {"tie_word_embeddings": True, "num_key_value_heads": 2},
    ),
    Case("qwen3, heads of hidden_size / heads", "Qwen3ForCausalLM", {"head_dim": 32}),
    Case(
        "qwen3, yarn rope, old spelling",
        "Qwen3ForCausalLM",
        {"rope_parameters": YARN},
        config=old_spelling,
    ),
]
