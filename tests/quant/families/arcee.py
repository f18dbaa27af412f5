"""Arcee: plain and scaled rope."""

from tests.quant.families import Case
from tests.quant.families.llama import LLAMA3, YARN, old_spelling

CASES = [
    Case("arcee, untied", "ArceeForCausalLM"),
    Case(
        "arcee, tied, 4 query heads per key head, llama 3 rope",
        "ArceeForCausalLM",
        {"tie_word_embeddings": True, "num_key_value_heads": 2, "rope_parameters": LLAMA3},
    ),
    Case(
        "arcee, yarn rope with mscale, old spelling",
        "ArceeForCausalLM",
        {"rope_parameters": YARN | {"mscale": 1.0}},
        config=old_spelling,
    ),
]
