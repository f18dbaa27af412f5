"""Apertus: parameters of the activation that differ by layer, biases, and rotary settings."""

from typing import Any

from tests.quant.families import Case
from tests.quant.families.llama import LLAMA3, YARN, old_spelling


def case(name: str, config: Any = None, **settings: Any) -> Case:
    return Case(f"apertus, {name}", "ApertusForCausalLM", settings, config=config)


CASES = [
    case("default rope"),
    case(
        "tied, biases, 4 query heads per key head, llama 3 rope, old spelling",
        old_spelling,
        tie_word_embeddings=True,
        attention_bias=True,
        num_key_value_heads=2,
        rope_parameters=LLAMA3,
    ),
    case("yarn rope", rope_parameters=YARN),
]
