"""Nemotron: partial rope in both config spellings, and biases."""

from typing import Any

from tests.quant.families import Case
from tests.quant.families.glm4_moe import YARN, old_spelling

SMALL: dict[str, Any] = {"head_dim": 32}


def case(name: str, config: Any = None, **settings: Any) -> Case:
    return Case(
        f"nemotron, {name}", "NemotronForCausalLM", SMALL | settings, norm=0.0, config=config
    )


CASES = [
    case("untied"),
    case("tied, biases", tie_word_embeddings=True, attention_bias=True, mlp_bias=True),
    case(
        "yarn rope, old spelling, 4 query heads per key head",
        old_spelling,
        rope_parameters=YARN,
        num_key_value_heads=2,
    ),
]
