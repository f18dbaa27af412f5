"""GLM 4: partly rotary heads, biases, tied embeddings, scaled positions, both config spellings."""

from typing import Any

from tests.quant.families import Case

PAD: dict[str, Any] = {
    "pad_token_id": 0
}  # the default of transformers is outside the tiny vocabulary


def case(name: str, **settings: Any) -> Case:
    return Case(f"glm4, {name}", "Glm4ForCausalLM", PAD | settings)


def old_spelling(config: dict[str, Any]) -> dict[str, Any]:
    """Return the config with rope_theta and partial_rotary_factor at its root, as before
    transformers 5.
    """
    rope = config.pop("rope_parameters")
    return config | {key: rope[key] for key in ("rope_theta", "partial_rotary_factor")}


CASES = [
    case("biases, half rotary"),
    case(
        "no biases, tied, 4 query heads per key head",
        attention_bias=False,
        tie_word_embeddings=True,
        num_key_value_heads=2,
    ),
    case(
        "linear rope, a quarter rotary",
        rope_parameters={
            "rope_type": "linear",
            "rope_theta": 20000.0,
            "factor": 4.0,
            "partial_rotary_factor": 0.25,
        },
    ),
    case(
        "yarn rope",
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 20000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 128,
            "partial_rotary_factor": 0.5,
        },
    ),
    Case(
        "glm4, old spelling",
        "Glm4ForCausalLM",
        PAD
        | {
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 5000.0,
                "partial_rotary_factor": 0.75,
            }
        },
        config=old_spelling,
    ),
]
