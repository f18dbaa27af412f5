"""OLMo 2."""

from tests.quant.families import Case
from tests.quant.families.llama import YARN, old_spelling

SQUARE = {"head_dim": None}

CASES = [
    Case("olmo2, untied", "Olmo2ForCausalLM", SQUARE),
    Case(
        "olmo2, tied, 4 query heads per key head",
        "Olmo2ForCausalLM",
        SQUARE | {"tie_word_embeddings": True, "num_key_value_heads": 2},
    ),
    Case(
        "olmo2, yarn rope, old spelling",
        "Olmo2ForCausalLM",
        SQUARE | {"rope_parameters": YARN},
        config=old_spelling,
    ),
]
