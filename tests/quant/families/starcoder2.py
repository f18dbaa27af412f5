"""StarCoder 2: tied and untied, and scaled rope."""

from typing import Any

from tests.quant.families import Case
from tests.quant.families.llama import YARN, old_spelling

SMALL: dict[str, Any] = {"head_dim": None}

CASES = [
    Case("starcoder2, untied", "Starcoder2ForCausalLM", SMALL),
    Case(
        "starcoder2, tied, 4 query heads per key head",
        "Starcoder2ForCausalLM",
        SMALL | {"tie_word_embeddings": True, "num_key_value_heads": 2},
    ),
    Case(
        "starcoder2, yarn rope, old spelling",
        "Starcoder2ForCausalLM",
        SMALL | {"rope_parameters": YARN},
        config=old_spelling,
    ),
]
