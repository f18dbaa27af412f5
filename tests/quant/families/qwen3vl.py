"""Qwen3-VL: rotary sections in both config spellings."""

from typing import Any

from tests.quant.families import TINY, Case
from tests.quant.families.qwen35 import VISION

# 32 rotary pairs. These sections cover all of them.
SECTIONS: dict[str, Any] = {
    "rope_type": "default",
    "rope_theta": 1e6,
    "mrope_section": [11, 11, 10],
    "mrope_interleaved": True,
}
# As in released models, these sections do not cover the two slowest pairs.
RELEASED = SECTIONS | {"rope_theta": 5e6, "mrope_section": [12, 10, 10]}
DEEPSTACK = VISION | {"deepstack_visual_indexes": [0]}


def old_spelling(config: dict[str, Any]) -> dict[str, Any]:
    """Return the config with rope_theta and rope_scaling, as before transformers 5."""
    text = config["text_config"]
    rope = text.pop("rope_parameters")
    text |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope}
    return config


def case(name: str, rope: dict[str, Any], **settings: Any) -> Case:
    return Case(
        f"qwen3vl, {name}",
        "Qwen3VLForConditionalGeneration",
        {
            "text_config": TINY | {"rope_parameters": rope} | settings,
            "vision_config": DEEPSTACK,
            "tie_word_embeddings": settings.get("tie_word_embeddings", False),
        },
    )


CASES = [
    case("sections of all pairs", SECTIONS),
    case("tied, sections as released", RELEASED, tie_word_embeddings=True),
    case(
        "yarn",
        SECTIONS | {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
    ),
    Case(
        "qwen3vl, old spelling",
        "Qwen3VLForConditionalGeneration",
        {"text_config": TINY | {"rope_parameters": RELEASED}, "vision_config": DEEPSTACK},
        config=old_spelling,
    ),
]
