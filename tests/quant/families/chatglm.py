"""GLM-4 and GLM-Edge: partial rope in both config spellings, with and without biases."""

from typing import Any

from tests.quant.families import Case
from tests.quant.families.glm4_moe import YARN, old_spelling

SMALL: dict[str, Any] = {"head_dim": 32, "pad_token_id": 0}

CASES = [
    Case("chatglm, biases", "GlmForCausalLM", SMALL),
    Case(
        "chatglm, tied, no biases, 4 query heads per key head, other base",
        "GlmForCausalLM",
        SMALL
        | {
            "tie_word_embeddings": True,
            "attention_bias": False,
            "num_key_value_heads": 2,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 50000.0,
                "partial_rotary_factor": 0.5,
            },
        },
    ),
    Case(
        "chatglm, yarn rope, old spelling",
        "GlmForCausalLM",
        SMALL | {"rope_parameters": YARN},
        config=old_spelling,
    ),
]
