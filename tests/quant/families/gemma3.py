"""Gemma 3: two rotary bases in both config spellings, window patterns, caps, and a vision part."""

from collections.abc import Callable
from typing import Any

from tests.quant.families import TINY, Case
from tests.quant.families.gemma2 import NARROW, scale_down_feed_forward

# The window is shorter than the compared text, and one of the six layers is global.
SMALL: dict[str, Any] = {
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 64,
    "sliding_window": 64,
    "num_hidden_layers": 6,
    "intermediate_size": 256,
}
LINEAR = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 30000.0},
}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}


def case(name: str, change: Callable[[Any], None] | None = None, **settings: Any) -> Case:
    return Case(f"gemma3, {name}", "Gemma3ForCausalLM", SMALL | settings, norm=0.0, change=change)


def old_spelling(config: dict[str, Any]) -> dict[str, Any]:
    """Return the config with rope_theta, rope_local_base_freq, rope_scaling and
    sliding_window_pattern, as before transformers 5.
    """
    rope = config.pop("rope_parameters")
    global_rope, local_rope = rope["full_attention"], rope["sliding_attention"]
    del config["layer_types"]
    return config | {
        "rope_theta": global_rope["rope_theta"],
        "rope_local_base_freq": local_rope["rope_theta"],
        "sliding_window_pattern": 3,
        "rope_scaling": {"rope_type": global_rope["rope_type"], "factor": global_rope["factor"]},
    }


CASES = [
    case("window, default bases"),
    case("4 query heads per key head, untied", num_key_value_heads=2, tie_word_embeddings=False),
    case("linear rope on global layers", rope_parameters=LINEAR),
    Case(
        "gemma3, old spelling, pattern 3",
        "Gemma3ForCausalLM",
        SMALL | {"rope_parameters": LINEAR, "sliding_window_pattern": 3},
        norm=0.0,
        config=old_spelling,
    ),
    case("capped logits", final_logit_softcapping=2.0),
    case("all layers global", layer_types=["full_attention"] * 6),
    case(
        "attention scale of 27B",
        num_hidden_layers=62,
        query_pre_attn_scalar=16,
        **NARROW,
        change=scale_down_feed_forward,
    ),
    Case(
        "gemma3, multimodal",
        "Gemma3ForConditionalGeneration",
        {
            "text_config": TINY | SMALL,
            "vision_config": VISION,
            "mm_tokens_per_image": 4,
            "tie_word_embeddings": True,
        },
        norm=0.0,
    ),
]
