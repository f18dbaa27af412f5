"""EXAONE 4: models without a window, and one of 64 layers with a window."""

from typing import Any

from tests.quant.families import Case
from tests.quant.families.llama import LLAMA3, YARN, old_spelling

GLOBAL: dict[str, Any] = {
    "head_dim": 32,
    "sliding_window": None,
    "layer_types": ["full_attention"] * 2,
}
HYBRID: dict[str, Any] = {
    "num_hidden_layers": 64,
    "hidden_size": 64,
    "head_dim": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "sliding_window": 64,
}


def case(name: str, base: dict[str, Any], **settings: Any) -> Case:
    return Case(f"exaone4, {name}", "Exaone4ForCausalLM", base | settings)


CASES = [
    case("all layers global", GLOBAL),
    case("tied, llama 3 rope", GLOBAL, tie_word_embeddings=True, rope_parameters=LLAMA3),
    Case(
        "exaone4, yarn rope, old spelling",
        "Exaone4ForCausalLM",
        GLOBAL | {"rope_parameters": YARN},
        config=old_spelling,
    ),
    case("window, llama 3 rope", HYBRID, rope_parameters=LLAMA3),
    case(
        "window, other pattern",
        HYBRID,
        layer_types=["full_attention", "sliding_attention", "sliding_attention"] * 21
        + ["full_attention"],
    ),
]
