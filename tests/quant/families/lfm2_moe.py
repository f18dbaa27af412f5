"""LFM2 with experts, separate and in one tensor."""

from typing import Any

from tests.quant.families import Case
from tests.quant.families.lfm2 import SMALL

EXPERTS: dict[str, Any] = {key: SMALL[key] for key in SMALL if key != "block_multiple_of"} | {
    "moe_intermediate_size": 64,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "num_dense_layers": 1,
}


def set_biases(model: Any) -> None:
    """Set the biases of the routers, which are buffers, to other numbers than 0."""
    for layer in model.model.layers[1:]:
        layer.feed_forward.expert_bias.normal_(0, 0.1)


CASES = [
    Case("lfm2moe, separate experts", "Lfm2MoeForCausalLM", EXPERTS, change=set_biases),
    Case(
        "lfm2moe, experts in one tensor",
        "Lfm2MoeForCausalLM",
        EXPERTS,
        change=set_biases,
        original=False,
    ),
]
