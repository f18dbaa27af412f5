"""Command R with and without norms of the heads, and Cohere 2 with layers of two kinds."""

from typing import Any

from tests.quant.families import Case
from tests.quant.families.llama import YARN, old_spelling

SMALL: dict[str, Any] = {"head_dim": None, "tie_word_embeddings": True}
LARGE: dict[str, Any] = SMALL | {
    "num_hidden_layers": 64,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "use_qk_norm": True,
}
WINDOW: dict[str, Any] = SMALL | {"num_hidden_layers": 4, "sliding_window": 64}


def old_pattern(config: dict[str, Any]) -> dict[str, Any]:
    """Return the config with sliding_window_pattern, as before transformers 5."""
    del config["layer_types"]
    return config | {"sliding_window_pattern": 2, "rotary_pct": 1.0}


CASES = [
    Case("command-r", "CohereForCausalLM", SMALL, scale=0.05),
    Case(
        "command-r, norms of heads, scaled logits",
        "CohereForCausalLM",
        LARGE | {"logit_scale": 0.5},
    ),
    Case(
        "command-r, yarn rope, old spelling",
        "CohereForCausalLM",
        SMALL | {"rope_parameters": YARN},
        config=old_spelling,
    ),
    Case("cohere2, every fourth layer global", "Cohere2ForCausalLM", WINDOW),
    Case(
        "cohere2, every second layer global, old spelling",
        "Cohere2ForCausalLM",
        WINDOW | {"layer_types": ["sliding_attention", "full_attention"] * 2},
        config=old_pattern,
    ),
]
