"""Llama 4: experts in every layer or in every second one, and a multimodal model."""

from typing import Any

from tests.quant.families import TINY, Case

# The fourth layer has no positions.
SMALL: dict[str, Any] = {
    "num_hidden_layers": 5,
    "intermediate_size": 64,
    "intermediate_size_mlp": 256,
    "num_local_experts": 4,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 1.0,
    "original_max_position_embeddings": 64,
}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
    "projector_input_dim": 32,
    "projector_output_dim": 32,
    "vision_output_dim": 32,
}
MANY = {  # as in Maverick, for which llama.cpp leaves out the norms of queries and keys
    "hidden_size": 64,
    "intermediate_size": 32,
    "head_dim": 32,
    "num_local_experts": 128,
    "use_qk_norm": False,
    "interleave_moe_layer_step": 2,
}

CASES = [
    Case("llama4", "Llama4ForCausalLM", SMALL | {"num_experts_per_tok": 2}),
    Case("llama4, 128 experts in every second layer", "Llama4ForCausalLM", SMALL | MANY),
    Case(
        "llama4, llama3 rope, tied",
        "Llama4ForCausalLM",
        SMALL | {"rope_parameters": LLAMA3_ROPE, "tie_word_embeddings": True},
    ),
    Case(
        "llama4, multimodal",
        "Llama4ForConditionalGeneration",
        {"text_config": TINY | SMALL, "vision_config": VISION},
    ),
]
