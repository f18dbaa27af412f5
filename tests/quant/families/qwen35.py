"""Qwen3.5: several orders of heads and layers, and a vision part."""

from typing import Any

from tests.quant.families import TINY, Case
from tests.quant.families.qwen3next import LINEAR, keep_inner_norms

# Eight rotary pairs, in sections that cover all of them
ROPE = {
    "rope_type": "default",
    "rope_theta": 1e7,
    "mrope_section": [3, 3, 2],
    "mrope_interleaved": True,
    "partial_rotary_factor": 0.25,
}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "depth": 1,
    "num_heads": 2,
    "out_hidden_size": 256,
    "num_position_embeddings": 16,
}


def case(name: str, hf: str = "Qwen3_5ForCausalLM", **settings: Any) -> Case:
    values = LINEAR | {"rope_parameters": ROPE} | settings
    return Case(f"qwen35, {name}", hf, values, norm=0.0, change=keep_inner_norms)


CASES = [
    case("three value heads per key head"),
    case(
        "as many key heads as value heads, tied", linear_num_key_heads=6, tie_word_embeddings=True
    ),
    case(
        "other order of layers, yarn",
        layer_types=["full_attention", "linear_attention", "linear_attention", "full_attention"],
        rope_parameters=ROPE
        | {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
    ),
    case("every second layer is linear", num_hidden_layers=5, full_attention_interval=2),
    case(
        "multimodal",
        "Qwen3_5ForConditionalGeneration",
        text_config=TINY | LINEAR | {"rope_parameters": ROPE},
        vision_config=VISION,
    ),
]
