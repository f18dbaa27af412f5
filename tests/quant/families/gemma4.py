"""Gemma 4: heads of two widths, shared keys and values, embeddings for each layer, and experts, in
both config spellings.
"""

from collections.abc import Callable
from typing import Any

from tests.quant.families import TINY, Case

# The window is shorter than the compared text, and every third layer is global.
SMALL: dict[str, Any] = {
    "tie_word_embeddings": True,
    "intermediate_size": 128,
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    "head_dim": 32,
    "global_head_dim": 64,
    "sliding_window": 64,
    "vocab_size_per_layer_input": 512,
    "hidden_size_per_layer_input": 32,
}
EFFECTIVE = {  # as in E2B and E4B
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True,
}
LARGE = {  # as in 31B and 26B-A4B
    "hidden_size_per_layer_input": 0,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 2,
    "final_logit_softcapping": 30.0,
}
EXPERTS = {
    "enable_moe_block": True,
    "num_experts": 8,
    "top_k_experts": 2,
    "moe_intermediate_size": 64,
}


THREE_LAYERS = {"num_hidden_layers": 3, "layer_types": SMALL["layer_types"][:3]}


def set_layers(model: Any) -> None:
    """Set the factor of each layer's output, which is a buffer, to another number than 1, and
    reduce what comes from GELU to a twentieth.

    ggml computes GELU with a 16-bit table, and its errors add up over the layers.
    """
    text = model.model.language_model if hasattr(model.model, "language_model") else model.model
    for number, layer in enumerate(text.layers):
        layer.layer_scalar.fill_(0.7 + 0.1 * number)
        layer.post_feedforward_layernorm.weight *= 0.05
        if getattr(layer, "hidden_size_per_layer_input", 0):
            layer.post_per_layer_input_norm.weight *= 0.05


def old_spelling(config: dict[str, Any]) -> dict[str, Any]:
    """Return the config with the widths of global layers at the root, as in released models."""
    widths = config.pop("per_layer_config")[str(config["layer_types"].index("full_attention"))]
    return config | {
        "global_head_dim": widths["head_dim"],
        "num_global_key_value_heads": widths.get("num_key_value_heads"),
    }


def case(
    name: str,
    *settings: dict[str, Any],
    config: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
) -> Case:
    values = dict(SMALL)
    for item in settings:
        values |= item
    return Case(f"gemma4, {name}", "Gemma4ForCausalLM", values, change=set_layers, config=config)


CASES = [
    case("embeddings for each layer"),
    case("shared keys and values", EFFECTIVE),
    case("shared keys and values, released spelling", EFFECTIVE, config=old_spelling),
    case("global layers without values", LARGE, config=old_spelling),
    case("experts", LARGE, EXPERTS, THREE_LAYERS),
    case("untied", LARGE, {"tie_word_embeddings": False}),
    Case(
        "gemma4, multimodal",
        "Gemma4ForConditionalGeneration",
        {
            "text_config": TINY | SMALL | EFFECTIVE | {"pad_token_id": 0},
            "vision_config": {
                "hidden_size": 32,
                "intermediate_size": 32,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "num_key_value_heads": 2,
                "head_dim": 16,
            },
            "audio_config": None,
            "tie_word_embeddings": True,
        },
        change=set_layers,
    ),
]
