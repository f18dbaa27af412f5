"""GLM 4.5 to 4.7 and Solar Open: partial rope, norms of heads, biases, expert groups."""

from typing import Any

from tests.quant.families import Case
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
]
