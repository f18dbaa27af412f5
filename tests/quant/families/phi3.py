"""Phi 3 and 4: fused matrices, long and short rotary factors, partly rotary heads, both spellings.

llama.cpp takes the long factors where its context (512 here) is larger than the original length,
transformers where the text (320 tokens) is: original lengths of 64 and 512 put both on one side.
"""

from typing import Any

import numpy as np

from tests.quant.families import Case

FACTORS = np.random.default_rng(5).uniform(1, 6, (2, 16)).round(3).tolist()
SMALL: dict[str, Any] = {"head_dim": None, "sliding_window": None, "pad_token_id": 0}


def long(original: int, pairs: int = 16, **more: Any) -> dict[str, Any]:
    """Settings of a model stretched from `original` to 1024 positions."""
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "long_factor": FACTORS[0][:pairs],
        "short_factor": FACTORS[1][:pairs],
        **more,
    }
    return {"original_max_position_embeddings": original, "rope_parameters": rope}


def case(name: str, **settings: Any) -> Case:
    return Case(f"phi3, {name}", "Phi3ForCausalLM", SMALL | settings)


def old_spelling(config: dict[str, Any]) -> dict[str, Any]:
    """rope_theta, rope_scaling with a type, partial_rotary_factor beside them, as before
    transformers 5.
    """
    rope = config.pop("rope_parameters")
    scaling = {
        "type": "longrope",
        "long_factor": rope["long_factor"],
        "short_factor": rope["short_factor"],
    }
    return config | {
        "rope_theta": rope["rope_theta"],
        "partial_rotary_factor": rope["partial_rotary_factor"],
        "rope_scaling": scaling,
    }


CASES = [
    case("untied"),
    case("4 queries a key, tied", num_key_value_heads=2, tie_word_embeddings=True),
    case(
        "partly rotary heads",
        rope_parameters={
            "rope_theta": 20000.0,
            "partial_rotary_factor": 0.75,
            "rope_type": "default",
        },
    ),
    case("long factors", **long(64)),
    case("short factors", **long(512)),
    case("long factors, attention factor said", **long(64, attention_factor=1.5)),
    case("long factors, factor said", **long(64, factor=4.0)),
    Case(
        "phi3, long factors, partly rotary, old spelling",
        "Phi3ForCausalLM",
        SMALL | long(64, 12, partial_rotary_factor=0.75),
        config=old_spelling,
    ),
]
