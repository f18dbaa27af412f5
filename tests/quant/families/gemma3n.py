"""Gemma 3n: layers with keys and values of their own, and models whose last layers share them."""

from typing import Any

from tests.quant.families import Case

# llama.cpp computes with fixed numbers of streams, sparse layers, and layers with keys and values.
SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 2048,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "tie_word_embeddings": True,
    "sliding_window": 64,
    "pad_token_id": 0,
    "vocab_size_per_layer_input": 512,
}
SHORT = {"num_hidden_layers": 12, "num_kv_shared_layers": 0}
SHARED = {"num_hidden_layers": 25, "num_kv_shared_layers": 5}
PARAMETERS = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 30000.0},
}


def weaken_layers(model: Any) -> None:
    """Reduce what comes from GELU to a tenth, and make attention less sharp.

    ggml computes GELU with a 16-bit table, and its errors add up over the layers. llama.cpp divides
    the variance of n activations by n - 1, transformers by n; the feed-forward is wide, so that this
    matters little.
    """
    for layer in model.model.layers:
        layer.self_attn.q_norm.weight *= 0.3
        layer.post_feedforward_layernorm.weight *= 0.1
        layer.post_per_layer_input_norm.weight *= 0.1


def old_spelling(config: dict[str, Any]) -> dict[str, Any]:
    """Return the config with rope_theta and rope_local_base_freq, as in released models."""
    rope = config.pop("rope_parameters")
    return config | {
        "rope_theta": rope["full_attention"]["rope_theta"],
        "rope_local_base_freq": rope["sliding_attention"]["rope_theta"],
        "rope_scaling": None,
    }


def multimodal_class(config: dict[str, Any]) -> dict[str, Any]:
    """Return the config with the class of the multimodal model. transformers builds its vision part
    only with the library timm, so this checkpoint is that of a text model.
    """
    return config | {"architectures": ["Gemma3nForConditionalGeneration"]}


def case(name: str, *settings: dict[str, Any], **changes: Any) -> Case:
    values = dict(SMALL)
    for item in settings:
        values |= item
    return Case(f"gemma3n, {name}", "Gemma3nForCausalLM", values, change=weaken_layers, **changes)


CASES = [
    case("window", SHORT),
    case("shared keys and values, released spelling", SHARED, config=old_spelling),
    case(
        "linear rope, fewer embeddings",
        SHORT,
        {"rope_parameters": PARAMETERS, "vocab_size_per_layer_input": 500},
    ),
    Case(
        "gemma3n, multimodal class",
        "Gemma3nForConditionalGeneration",
        SMALL | SHORT,
        change=weaken_layers,
        config=multimodal_class,
        built="Gemma3nForCausalLM",
    ),
]
