"""ERNIE 4.5: dense models, and models with experts."""

from typing import Any

from tests.quant.families import Case
from tests.quant.families.llama import YARN, old_spelling

DENSE, MOE = "Ernie4_5ForCausalLM", "Ernie4_5_MoeForCausalLM"
EXPERTS: dict[str, Any] = {
    "head_dim": 32,
    "num_hidden_layers": 3,
    "moe_intermediate_size": 64,
    "moe_num_experts": 8,
    "moe_num_shared_experts": 2,
    "moe_k": 3,
}


def randomize_router_biases(model: Any) -> None:
    """Set router biases that change the selection of experts."""
    for layer in model.model.layers:
        if hasattr(layer.mlp, "gate"):
            layer.mlp.gate.moe_statics.e_score_correction_bias.normal_(0, 0.1)


def case(name: str, *, original: bool = True, **settings: Any) -> Case:
    return Case(
        f"ernie4_5 moe, {name}",
        MOE,
        EXPERTS | settings,
        change=randomize_router_biases,
        original=original,
    )


CASES = [
    Case("ernie4_5, untied", DENSE),
    Case(
        "ernie4_5, tied, 4 query heads per key head",
        DENSE,
        {"tie_word_embeddings": True, "num_key_value_heads": 2},
    ),
    Case(
        "ernie4_5, yarn rope, old spelling",
        DENSE,
        {"rope_parameters": YARN},
        config=old_spelling,
    ),
    case("separate experts"),
    case(
        "fused experts, all layers mixed, tied",
        original=False,
        moe_layer_start_index=0,
        tie_word_embeddings=True,
    ),
    case("no shared experts", moe_num_shared_experts=0),
]
