"""Qwen3-VL with experts, as transformers 5 saves them. Released ones are transposed
(test_qwen3_vl_moe.py).
"""

from typing import Any

from tests.quant.families import TINY, Case
from tests.quant.families.qwen3vl import DEEPSTACK, RELEASED, SECTIONS

MOE = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 192}


def case(name: str, rope: dict[str, Any], **settings: Any) -> Case:
    values = {"rope_parameters": rope, "tie_word_embeddings": False}
    return Case(
        f"qwen3vlmoe, {name}",
        "Qwen3VLMoeForConditionalGeneration",
        {
            "text_config": TINY | MOE | values | settings,
            "vision_config": DEEPSTACK,
            "tie_word_embeddings": settings.get("tie_word_embeddings", False),
        },
    )


CASES = [
    case("sections of all pairs", SECTIONS),
    case("tied, sections as released", RELEASED, tie_word_embeddings=True),
    case("experts of half the model's width", RELEASED, moe_intermediate_size=128),
]
