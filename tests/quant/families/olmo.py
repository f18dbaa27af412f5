"""OLMo 1: with and without clipping."""

from typing import Any

from tests.quant.families import Case
from tests.quant.families.llama import YARN, old_spelling

SMALL: dict[str, Any] = {"head_dim": None}

CASES = [
    Case("olmo, untied", "OlmoForCausalLM", SMALL),
    Case(
        "olmo, clipped, tied, 4 query heads per key head",
        "OlmoForCausalLM",
        SMALL | {"clip_qkv": 1.5, "tie_word_embeddings": True, "num_key_value_heads": 2},
    ),
    Case(
        "olmo, yarn rope, old spelling",
        "OlmoForCausalLM",
        SMALL | {"rope_parameters": YARN},
        config=old_spelling,
    ),
]
