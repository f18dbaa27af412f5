"""MiniMax M2: partial rope in both config spellings, and both spellings of the experts."""

from typing import Any

from tests.quant.families import Case

MOE: dict[str, Any] = {
    "intermediate_size": 96,
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "rotary_dim": 32,
}


def randomize_router_biases(model: Any) -> None:
    """Set random router biases. They are buffers, which transformers initializes to 0."""
    for layer in model.model.layers:
        layer.mlp.e_score_correction_bias.normal_(0, 0.3)


def old_spelling(config: dict[str, Any]) -> dict[str, Any]:
    """Return the config with rope_theta and rotary_dim, as in the released models."""
    settings = config.pop("rope_parameters")
    return config | {"rope_theta": settings["rope_theta"], "rotary_dim": 32}


def case(name: str, *, original: bool = True, config: Any = None, **settings: Any) -> Case:
    return Case(
        f"minimax-m2, {name}",
        "MiniMaxM2ForCausalLM",
        MOE | settings,
        change=randomize_router_biases,
        original=original,
        config=config,
    )


CASES = [
    case("separate experts"),
    case("fused experts, tied", original=False, tie_word_embeddings=True),
    case("old spelling, 4 query heads per key head", config=old_spelling, num_key_value_heads=2),
]
