"""Mistral Small 3 and Ministral 3: multimodal models, and queries that are scaled by position."""

from typing import Any

from tests.quant.families import TINY, Case

# Positions are scaled from 128 on, within the compared text.
ROPE = {
    "rope_type": "yarn",
    "type": "yarn",
    "rope_theta": 1000000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 128,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale_all_dim": 1.0,
    "mscale": 1.0,
    "llama_4_scaling_beta": 0.3,
}
MINISTRAL = {"rope_parameters": ROPE, "max_position_embeddings": 2048}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "head_dim": 16,
    "image_size": 28,
    "patch_size": 14,
}


def multimodal(name: str, **text: Any) -> Case:
    """Return the case of a multimodal model with the text model of these settings."""
    values = TINY | text
    return Case(
        f"mistral3, {name}",
        "Mistral3ForConditionalGeneration",
        {
            "text_config": values,
            "vision_config": VISION | {"model_type": "pixtral"},
            "tie_word_embeddings": values["tie_word_embeddings"],
        },
    )


CASES = [
    Case("mistral3, ministral", "Ministral3ForCausalLM", MINISTRAL),
    Case(
        "mistral3, ministral, other factors",
        "Ministral3ForCausalLM",
        MINISTRAL
        | {"rope_parameters": ROPE | {"mscale_all_dim": 0.5}, "tie_word_embeddings": True},
    ),
    multimodal("Small 3.1", model_type="mistral", sliding_window=None, rope_theta=1e6),
    multimodal("Ministral 3", model_type="ministral3", **MINISTRAL, tie_word_embeddings=True),
]
