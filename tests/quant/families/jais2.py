"""Jais 2: tied and untied, and scaled rope."""

from tests.quant.families import Case
from tests.quant.families.llama import YARN, old_spelling

CASES = [
    Case("jais2, untied", "Jais2ForCausalLM"),
    Case(
        "jais2, tied, 4 query heads per key head",
        "Jais2ForCausalLM",
        {"tie_word_embeddings": True, "num_key_value_heads": 2},
    ),
    Case(
        "jais2, yarn rope, old spelling",
        "Jais2ForCausalLM",
        {"rope_parameters": YARN},
        config=old_spelling,
    ),
]
