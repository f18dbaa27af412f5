"""Qwen2-VL and Qwen2.5-VL: both config spellings, as released (flat) and nested."""

from typing import Any

from tests.quant.families import TINY, Case

# The width of a head is hidden_size / heads: 16 rotary pairs.
TEXT: dict[str, Any] = {key: value for key, value in TINY.items() if key != "head_dim"} | {
    "rms_norm_eps": 1e-7  # llama.cpp computes with 0
}
ROPE = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [4, 6, 6]}
VISION = {"depth": 1, "num_heads": 2, "out_hidden_size": 256, "intermediate_size": 32}
CLASSES = {
    "Qwen2VLForConditionalGeneration": {"embed_dim": 32, "hidden_size": 256, "mlp_ratio": 1},
    "Qwen2_5_VLForConditionalGeneration": {"hidden_size": 32},
}


def flat(config: dict[str, Any]) -> dict[str, Any]:
    """Return the config with the text part's settings at the root and rope_scaling, as released."""
    text = config.pop("text_config")
    rope = text.pop("rope_parameters")
    text |= {
        "rope_theta": rope["rope_theta"],
        "rope_scaling": {"type": "mrope", "mrope_section": rope["mrope_section"]},
    }
    return text | config


def case(name: str, hf: str, **settings: Any) -> Case:
    is_tied = settings.pop("tie_word_embeddings", False)
    return Case(
        f"qwen2vl, {name}",
        hf,
        {
            "head_dim": None,
            "text_config": TEXT
            | {"rope_parameters": ROPE, "tie_word_embeddings": is_tied}
            | settings,
            "vision_config": VISION | CLASSES[hf],
            "tie_word_embeddings": is_tied,
        },
        config=flat if "flat" in name else None,
    )


CASES = [
    case("Qwen2", "Qwen2VLForConditionalGeneration"),
    case("Qwen2.5, flat", "Qwen2_5_VLForConditionalGeneration"),
    case("Qwen2.5, tied", "Qwen2_5_VLForConditionalGeneration", tie_word_embeddings=True),
    case(
        "Qwen2.5, yarn",
        "Qwen2_5_VLForConditionalGeneration",
        rope_parameters=ROPE
        | {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
    ),
]
