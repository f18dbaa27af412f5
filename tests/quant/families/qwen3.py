"""Qwen3: heads wider than hidden / heads."""

from tests.quant.families import Case
from tests.quant.families.llama import YARN, old_spelling

CASES = [
    Case("qwen3, untied", "Qwen3ForCausalLM"),
    Case(
        "qwen3, tied, 4 queries a key",
        "Qwen3ForCausalLM",
        {"tie_word_embeddings": True, "num_key_value_heads": 2},
    ),
    Case("qwen3, heads as wide as their share", "Qwen3ForCausalLM", {"head_dim": 32}),
    Case(
        "qwen3, yarn rope, old spelling",
        "Qwen3ForCausalLM",
        {"rope_parameters": YARN},
        config=old_spelling,
    ),
]
