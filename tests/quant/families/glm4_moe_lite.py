"""GLM 4.7 Flash: the attention and experts of DeepSeek V3 in other sizes."""

from typing import Any

from tests.quant.families import Case
from tests.quant.families.deepseek2 import ONE_GROUP, SIZES, randomize_router_biases

SMALL: dict[str, Any] = {
    name: value for name, value in SIZES.items() if name != "first_k_dense_replace"
} | ONE_GROUP


def case(name: str, *, original: bool = True, **settings: Any) -> Case:
    return Case(
        f"glm4moelite, {name}",
        "Glm4MoeLiteForCausalLM",
        SMALL | settings,
        change=randomize_router_biases,
        original=original,
    )


CASES = [
    case("first layer dense"),
    case(
        "fused experts, two dense layers, tied",
        original=False,
        mlp_layer_types=["dense", "dense", "sparse"],
        tie_word_embeddings=True,
    ),
    case("groups, rotary halves", n_group=4, topk_group=2, rope_interleave=False),
]
