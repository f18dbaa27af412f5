"""Mistral 4: compressed attention, experts in one tensor or separate, scaled queries."""

from typing import Any

from tests.quant.families import TINY, Case
from tests.quant.families.mistral3 import ROPE, VISION

SMALL: dict[str, Any] = {
    "head_dim": None,
    "num_key_value_heads": 8,
    "intermediate_size": 256,
    "moe_intermediate_size": 64,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "kv_lora_rank": 64,
    "q_lora_rank": 96,
    "qk_rope_head_dim": 32,
    "qk_nope_head_dim": 32,
    "v_head_dim": 64,
    "rope_parameters": ROPE,
    "max_position_embeddings": 2048,
}
TEXT = {key: value for key, value in (TINY | SMALL).items() if value is not None}

CASES = [
    Case("mistral4", "Mistral4ForCausalLM", SMALL),
    Case(
        "mistral4, a dense layer, groups, no interleaving",
        "Mistral4ForCausalLM",
        SMALL
        | {
            "first_k_dense_replace": 1,
            "num_hidden_layers": 3,
            "n_group": 4,
            "topk_group": 2,
            "rope_interleave": False,
            "routed_scaling_factor": 1.5,
        },
    ),
    Case(
        "mistral4, multimodal",
        "Mistral3ForConditionalGeneration",
        {
            "text_config": TEXT | {"model_type": "mistral4"},
            "vision_config": VISION | {"model_type": "pixtral"},
            "tie_word_embeddings": False,
        },
    ),
]
