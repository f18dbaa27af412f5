"""Hunyuan: dense models, models with experts, and a rotary base changed by alpha."""

from typing import Any

from tests.quant.families import Case
from tests.quant.families.llama import YARN, old_spelling

DENSE, MOE = "HunYuanDenseV1ForCausalLM", "HunYuanMoEV1ForCausalLM"
ALPHA = {"rope_type": "dynamic", "rope_theta": 10000.0, "alpha": 1000.0, "factor": 1.0}
EXPERTS = {"intermediate_size": 96, "num_experts": 8, "moe_topk": 3}


def list_settings(config: dict[str, Any]) -> dict[str, Any]:
    """Return the config with settings for each layer, as in Hunyuan-A13B."""
    layers = config["num_hidden_layers"]
    return old_spelling(config) | {
        "moe_topk": [config["moe_topk"]] * layers,
        "moe_intermediate_size": [config["intermediate_size"]] * layers,
        "num_shared_expert": [1] * layers,
    }


CASES = [
    Case("hunyuan, untied", DENSE),
    Case(
        "hunyuan, alpha, tied, 4 query heads per key head, old spelling",
        DENSE,
        {"tie_word_embeddings": True, "num_key_value_heads": 2, "rope_parameters": ALPHA},
        config=old_spelling,
    ),
    Case("hunyuan, yarn rope", DENSE, {"rope_parameters": YARN}),
    Case("hunyuan moe, separate experts", MOE, EXPERTS),
    Case(
        "hunyuan moe, fused experts, tied",
        MOE,
        EXPERTS | {"tie_word_embeddings": True},
        original=False,
    ),
    Case(
        "hunyuan moe, alpha, lists",
        MOE,
        EXPERTS | {"rope_parameters": ALPHA},
        config=list_settings,
    ),
]
