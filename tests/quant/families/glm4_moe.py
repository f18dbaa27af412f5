"""GLM 4.5 to 4.7 and Solar Open: partial rope, norms of heads, biases, expert groups."""

from typing import Any

from tests.quant.families import TINY, Case
from tests.quant.families.deepseek2 import randomize_router_biases

MOE: dict[str, Any] = {
    "num_hidden_layers": 3,
    "moe_intermediate_size": 64,
    "n_routed_experts": 16,
    "n_shared_experts": 2,
    "num_experts_per_tok": 4,
    "routed_scaling_factor": 2.5,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 128,
    "partial_rotary_factor": 0.5,
}
SECTIONS = {
    "rope_type": "default",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.5,
    "mrope_section": [4, 6, 6],
}
VISION = {
    "depth": 1,
    "hidden_size": 32,
    "num_heads": 2,
    "intermediate_size": 32,
    "out_hidden_size": 256,
    "image_size": 28,
}


def case(name: str, hf: str = "Glm4MoeForCausalLM", **settings: Any) -> Case:
    return Case(
        f"glm4moe, {name}",
        hf,
        MOE | settings,
        change=randomize_router_biases,
        original=not name.startswith("fused"),
    )


def old_spelling(config: dict[str, Any]) -> dict[str, Any]:
    """Return the config with rope_theta, rope_scaling and partial_rotary_factor at the root, as
    before transformers 5.
    """
    settings = config.pop("rope_parameters")
    return config | {
        "partial_rotary_factor": settings.pop("partial_rotary_factor"),
        "rope_theta": settings.pop("rope_theta"),
        "rope_scaling": settings,
    }


def randomize_text_biases(model: Any) -> None:
    """Set random router biases of the text part."""
    for layer in model.model.language_model.layers:
        if hasattr(layer.mlp, "gate"):
            layer.mlp.gate.e_score_correction_bias.normal_(0, 0.3)


def old_vision_spelling(config: dict[str, Any]) -> dict[str, Any]:
    """Return the config with rope_theta, rope_scaling and partial_rotary_factor in text_config."""
    return config | {"text_config": old_spelling(config["text_config"])}


def vision_case(name: str, rope: dict[str, Any], **settings: Any) -> Case:
    return Case(
        f"glm4moe, {name}",
        "Glm4vMoeForConditionalGeneration",
        {
            "text_config": TINY | MOE | {"rope_parameters": rope} | settings,
            "vision_config": VISION,
            "tie_word_embeddings": settings.get("tie_word_embeddings", False),
        },
        change=randomize_text_biases,
        config=old_vision_spelling if "old" in name else None,
    )


CASES = [
    case("as in 4.5 Air", attention_bias=True),
    case("norms of heads, as in 4.5", attention_bias=True, use_qk_norm=True),
    case(
        "fused experts, no dense layer, tied, 4 query heads per key head",
        first_k_dense_replace=0,
        tie_word_embeddings=True,
        num_key_value_heads=2,
    ),
    case("groups, weights not normalized", n_group=4, topk_group=2, norm_topk_prob=False),
    Case(
        "glm4moe, yarn rope, old spelling",
        "Glm4MoeForCausalLM",
        MOE | {"rope_parameters": YARN},
        change=randomize_router_biases,
        config=old_spelling,
    ),
    case("solar open", "SolarOpenForCausalLM"),
    vision_case("text part of 4.5V", SECTIONS),
    vision_case("text part of 4.5V, tied, old spelling", SECTIONS, tie_word_embeddings=True),
]
