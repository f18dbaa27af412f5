"""Qwen3-VL with experts, stored transposed as released and as transformers 5 has them."""

from typing import Any

from tests.quant.families import TINY, Case
from tests.quant.families.qwen3vl import DEEPSTACK, RELEASED, SECTIONS

MOE = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 192}


def case(name: str, rope: dict[str, Any], original: bool = True, **settings: Any) -> Case:
    values = {"rope_parameters": rope, "tie_word_embeddings": False}
    return Case(
        f"qwen3vlmoe, {name}",
        "Qwen3VLMoeForConditionalGeneration",
        {
            "text_config": TINY | MOE | values | settings,
            "vision_config": DEEPSTACK,
            "tie_word_embeddings": settings.get("tie_word_embeddings", False),
        },
        original=original,
    )


CASES = [
    case("transposed experts", SECTIONS),
    case("experts of transformers 5, tied", RELEASED, original=False, tie_word_embeddings=True),
    case(
        "experts that are as wide as the model",
        RELEASED,
        moe_intermediate_size=128,
    ),
]
