"""Gemma 2: capped logits, sliding windows on several layer patterns, and scaled positions."""

from collections.abc import Callable
from typing import Any

from tests.quant.families import Case

# The window is shorter than the compared text, and the caps are low enough to affect random logits.
SMALL: dict[str, Any] = {
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 64,
    "sliding_window": 64,
    "attn_logit_softcapping": 5.0,
    "final_logit_softcapping": 2.0,
    "num_hidden_layers": 4,
}


# Small layers for models with many of them.
NARROW: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def case(name: str, change: Callable[[Any], None] | None = None, **settings: Any) -> Case:
    return Case(f"gemma2, {name}", "Gemma2ForCausalLM", SMALL | settings, norm=0.0, change=change)


def scale_down_feed_forward(model: Any) -> None:
    """Reduce the output of each feed-forward network to a tenth.

    ggml computes GELU with a 16-bit table, and its errors add up over many layers.
    """
    for layer in model.model.layers:
        layer.post_feedforward_layernorm.weight -= 0.9


def old_spelling(config: dict[str, Any]) -> dict[str, Any]:
    """Return the config with rope_theta and no layer_types, as before transformers 5."""
    settings = config.pop("rope_parameters")
    del config["layer_types"]
    return config | {"rope_theta": settings["rope_theta"]}


CASES = [
    case("window, caps"),
    case(
        "4 query heads per key head, default caps",
        num_key_value_heads=2,
        attn_logit_softcapping=50.0,
        final_logit_softcapping=30.0,
    ),
    case(
        "other sliding layers",
        layer_types=["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
    ),
    case(
        "linear rope", rope_parameters={"rope_type": "linear", "rope_theta": 20000.0, "factor": 4.0}
    ),
    case(
        "attention scale of 27B",
        num_hidden_layers=46,
        query_pre_attn_scalar=16,
        **NARROW,
        change=scale_down_feed_forward,
    ),
    Case("gemma2, old spelling", "Gemma2ForCausalLM", SMALL, norm=0.0, config=old_spelling),
]
