"""Qwen2 and Qwen2.5."""

from tests.quant.families import Case
from tests.quant.families.llama import YARN, old_spelling

SQUARE = {"head_dim": None, "sliding_window": None, "max_window_layers": 28}

CASES = [
    Case("qwen2, untied", "Qwen2ForCausalLM", SQUARE),
    Case(
        "qwen2, tied, 4 query heads per key head",
        "Qwen2ForCausalLM",
        SQUARE | {"tie_word_embeddings": True, "num_key_value_heads": 2},
    ),
    Case(
        "qwen2, yarn rope",
        "Qwen2ForCausalLM",
        SQUARE | {"rope_parameters": YARN | {"rope_theta": 1e6}},
    ),
    Case(
        "qwen2, yarn rope, old spelling",
        "Qwen2ForCausalLM",
        SQUARE | {"rope_parameters": YARN},
        config=old_spelling,
    ),
    Case(
        "qwen2, a window that no layer uses",
        "Qwen2ForCausalLM",
        SQUARE | {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 2},
    ),
]
