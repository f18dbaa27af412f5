"""AFMoE: layers with and without a window, dense layers, router biases."""

from typing import Any

from tests.quant.families import Case
from tests.quant.families.llama import YARN, old_spelling

SMALL: dict[str, Any] = {
    "num_hidden_layers": 5,
    "hidden_size": 256,
    "moe_intermediate_size": 64,
    "num_experts": 16,
    "num_shared_experts": 2,
    "num_experts_per_tok": 4,
    "num_dense_layers": 1,
    "route_scale": 2.5,
    "sliding_window": 64,
    "mup_enabled": True,
}


def case(name: str, *, original: bool = True, config: Any = None, **settings: Any) -> Case:
    return Case(
        f"afmoe, {name}",
        "AfmoeForCausalLM",
        SMALL | settings,
        original=original,
        config=config,
    )


CASES = [
    case("separate experts"),
    case(
        "fused experts, two dense layers, tied",
        original=False,
        num_dense_layers=2,
        tie_word_embeddings=True,
    ),
    case(
        "yarn rope, old spelling, 4 query heads per key head",
        config=old_spelling,
        rope_parameters=YARN,
        num_key_value_heads=2,
    ),
]
