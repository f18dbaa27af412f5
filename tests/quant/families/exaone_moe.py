"""K-EXAONE: layers with and without a window, dense layers, expert groups."""

from typing import Any

from tests.quant.families import Case
from tests.quant.families.deepseek2 import randomize_router_biases
from tests.quant.families.llama import LLAMA3

SMALL: dict[str, Any] = {
    "num_hidden_layers": 4,
    "head_dim": 64,
    "moe_intermediate_size": 64,
    "num_experts": 16,
    "num_shared_experts": 2,
    "num_experts_per_tok": 4,
    "sliding_window": 64,
}


def case(name: str, *, original: bool = True, **settings: Any) -> Case:
    return Case(
        f"exaone-moe, {name}",
        "ExaoneMoeForCausalLM",
        SMALL | settings,
        change=randomize_router_biases,
        original=original,
    )


CASES = [
    case("every fourth layer global"),
    case(
        "fused experts, two dense layers, other pattern, tied",
        original=False,
        mlp_layer_types=["dense", "dense", "sparse", "sparse"],
        layer_types=["full_attention", "sliding_attention"] * 2,
        tie_word_embeddings=True,
    ),
    case("groups, llama 3 rope", n_group=4, topk_group=2, rope_parameters=LLAMA3),
]
