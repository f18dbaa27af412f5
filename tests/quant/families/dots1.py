"""dots.llm1: dense layers, expert groups, router biases."""

from typing import Any

from tests.quant.families import Case
from tests.quant.families.deepseek2 import randomize_router_biases
from tests.quant.families.llama import YARN, old_spelling

MOE: dict[str, Any] = {
    "num_key_value_heads": 8,
    "head_dim": 32,
    "num_hidden_layers": 3,
    "moe_intermediate_size": 64,
    "n_routed_experts": 16,
    "n_shared_experts": 2,
    "num_experts_per_tok": 4,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
}


def case(name: str, *, original: bool = True, config: Any = None, **settings: Any) -> Case:
    return Case(
        f"dots1, {name}",
        "Dots1ForCausalLM",
        MOE | settings,
        change=randomize_router_biases,
        original=original,
        config=config,
    )


CASES = [
    case("separate experts"),
    case(
        "fused experts, no dense layer, tied",
        original=False,
        first_k_dense_replace=0,
        tie_word_embeddings=True,
    ),
    case("groups, weights not normalized", n_group=4, topk_group=2, norm_topk_prob=False),
    case("yarn rope, old spelling", rope_parameters=YARN, config=old_spelling),
]
