"""Seed-OSS: with and without biases, and scaled rope."""

from tests.quant.families import Case
from tests.quant.families.llama import YARN, old_spelling

CASES = [
    Case("seed_oss, biases", "SeedOssForCausalLM"),
    Case(
        "seed_oss, tied, no biases, 4 query heads per key head",
        "SeedOssForCausalLM",
        {"tie_word_embeddings": True, "attention_bias": False, "num_key_value_heads": 2},
    ),
    Case(
        "seed_oss, yarn rope, old spelling",
        "SeedOssForCausalLM",
        {"rope_parameters": YARN},
        config=old_spelling,
    ),
]
