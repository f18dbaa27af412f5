"""Qwen3.5 with experts."""

from typing import Any

from tests.quant.families import TINY, Case
from tests.quant.families.qwen3next import LINEAR, MOE, keep_inner_norms
from tests.quant.families.qwen35 import ROPE, VISION

VALUES: dict[str, Any] = LINEAR | MOE | {"rope_parameters": ROPE}


def case(name: str, hf: str = "Qwen3_5MoeForCausalLM", **settings: Any) -> Case:
    values = VALUES | settings
    return Case(f"qwen35moe, {name}", hf, values, norm=0.0, change=keep_inner_norms)


def without_dense_width(config: dict[str, Any]) -> dict[str, Any]:
    """Return the config without intermediate_size, which released checkpoints do not have."""
    return {key: value for key, value in config.items() if key != "intermediate_size"}


CASES = [
    case("three value heads per key head"),
    Case(
        "qwen35moe, tied, no intermediate_size",
        "Qwen3_5MoeForCausalLM",
        VALUES | {"tie_word_embeddings": True, "linear_num_key_heads": 6},
        norm=0.0,
        change=keep_inner_norms,
        config=without_dense_width,
    ),
    case(
        "multimodal",
        "Qwen3_5MoeForConditionalGeneration",
        text_config=TINY | VALUES,
        vision_config=VISION,
    ),
]
