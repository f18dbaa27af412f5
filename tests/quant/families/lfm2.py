"""LFM2: convolutions and attention, both spellings of config.json, and a multimodal model."""

from typing import Any

from tests.quant.families import TINY, Case

SMALL: dict[str, Any] = {
    "head_dim": None,
    "intermediate_size": 384,
    "block_multiple_of": 64,
    "num_hidden_layers": 4,
    "layer_types": ["conv", "full_attention", "conv", "full_attention"],
    "tie_word_embeddings": True,
    "pad_token_id": 0,
}
TEXT = {key: value for key, value in (TINY | SMALL).items() if value is not None}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "model_type": "siglip2_vision_model",
}


def old_spelling(config: dict[str, Any]) -> dict[str, Any]:
    """Return the config as in released models."""
    types = config.pop("layer_types")
    return config | {
        "block_ff_dim": config.pop("intermediate_size"),
        "full_attn_idxs": [i for i, kind in enumerate(types) if kind == "full_attention"],
        "rope_theta": config.pop("rope_parameters")["rope_theta"],
        "tie_embedding": config.pop("tie_word_embeddings"),
    }


CASES = [
    Case("lfm2", "Lfm2ForCausalLM", SMALL),
    Case(
        "lfm2, released spelling, width as it is",
        "Lfm2ForCausalLM",
        SMALL | {"block_auto_adjust_ff_dim": False, "conv_L_cache": 4},
        config=old_spelling,
    ),
    Case("lfm2, untied", "Lfm2ForCausalLM", SMALL | {"tie_word_embeddings": False}),
    Case(
        "lfm2, multimodal",
        "Lfm2VlForConditionalGeneration",
        {
            "text_config": TEXT | {"model_type": "lfm2", "block_auto_adjust_ff_dim": False},
            "vision_config": VISION,
            "head_dim": None,
            "tie_word_embeddings": True,
        },
    ),
]
