"""Phi 1 to 2: partial rope in both config spellings."""

from typing import Any

from tests.quant.families import Case
from tests.quant.families.glm4_moe import YARN, old_spelling

SMALL: dict[str, Any] = {"head_dim": None}

CASES = [
    Case("phi2, untied", "PhiForCausalLM", SMALL),
    Case(
        "phi2, tied, 4 query heads per key head",
        "PhiForCausalLM",
        SMALL | {"tie_word_embeddings": True, "num_key_value_heads": 2},
    ),
    Case(
        "phi2, yarn rope, old spelling",
        "PhiForCausalLM",
        SMALL | {"rope_parameters": YARN},
        config=old_spelling,
    ),
]
