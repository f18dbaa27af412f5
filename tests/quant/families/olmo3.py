"""OLMo 3: a window shorter than the compared text, and scaled positions on global layers only."""

from typing import Any

from tests.quant.families import Case

SMALL: dict[str, Any] = {
    "head_dim": None,
    "num_hidden_layers": 4,
    "intermediate_size": 256,
    "sliding_window": 64,
}
YARN = {
    "full_attention": {
        "rope_type": "yarn",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "attention_factor": 1.2079441541679836,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "original_max_position_embeddings": 128,
    },
    "sliding_attention": {"rope_type": "default", "rope_theta": 500000.0},
}
OTHER_PATTERN = ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]


def case(name: str, **settings: Any) -> Case:
    return Case(f"olmo3, {name}", "Olmo3ForCausalLM", SMALL | settings)


def old_spelling(config: dict[str, Any]) -> dict[str, Any]:
    """Return the config with rope_theta and rope_scaling, as before transformers 5."""
    settings = config.pop("rope_parameters")["full_attention"]
    return config | {"rope_theta": settings.pop("rope_theta"), "rope_scaling": settings}


CASES = [
    case("every fourth layer global"),
    case("other pattern, tied", layer_types=OTHER_PATTERN, tie_word_embeddings=True),
    case("all layers global", layer_types=["full_attention"] * 4),
    case("yarn on global layers", rope_parameters=YARN),
    Case(
        "olmo3, yarn, old spelling",
        "Olmo3ForCausalLM",
        SMALL | {"rope_parameters": YARN},
        config=old_spelling,
    ),
]
