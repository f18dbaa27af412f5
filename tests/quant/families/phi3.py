"""Phi 3 and 4: fused matrices, long and short rotary factors, partly rotary heads.

llama.cpp uses the long factors if its context (512 here) is larger than the original length, and
transformers if the text (320 tokens) is. With original lengths of 64 and 512 both use the same.
"""

from typing import Any

import numpy as np

from tests.quant.families import Case

FACTORS = np.random.default_rng(5).uniform(1, 6, (2, 16)).round(3).tolist()
SMALL: dict[str, Any] = {"head_dim": None, "sliding_window": None, "pad_token_id": 0}


def longrope_settings(original: int, pairs: int = 16, **rope_settings: Any) -> dict[str, Any]:
    """Return LongRoPE settings of a model extended from `original` to 1024 positions.

    `pairs` is the number of rotary pairs. `rope_settings` are added to rope_parameters.
    """
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "long_factor": FACTORS[0][:pairs],
        "short_factor": FACTORS[1][:pairs],
        **rope_settings,
    }
    return {"original_max_position_embeddings": original, "rope_parameters": rope}


def case(name: str, **settings: Any) -> Case:
    return Case(f"phi3, {name}", "Phi3ForCausalLM", SMALL | settings)


def old_spelling(config: dict[str, Any]) -> dict[str, Any]:
    """Return the config with rope_theta, rope_scaling and partial_rotary_factor at its root, as
    before transformers 5.
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
    case("4 query heads per key head, tied", num_key_value_heads=2, tie_word_embeddings=True),
    case(
        "partly rotary heads",
        rope_parameters={
            "rope_theta": 20000.0,
            "partial_rotary_factor": 0.75,
            "rope_type": "default",
        },
    ),
    case("long factors", **longrope_settings(64)),
    case("short factors", **longrope_settings(512)),
    case("long factors, explicit attention factor", **longrope_settings(64, attention_factor=1.5)),
    case("long factors, explicit factor", **longrope_settings(64, factor=4.0)),
    Case(
        "phi3, long factors, partly rotary, old spelling",
        "Phi3ForCausalLM",
        SMALL | longrope_settings(64, 12, partial_rotary_factor=0.75),
        config=old_spelling,
    ),
]
