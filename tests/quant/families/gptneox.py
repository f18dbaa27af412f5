"""GPT-NeoX: both kinds of blocks, and both spellings of the rotary settings.

llama.cpp approximates the GELU, which transformers computes exactly in the first case.
"""

from typing import Any

from tests.quant.families import Case

SMALL: dict[str, Any] = {"head_dim": None, "num_key_value_heads": None}


def old_spelling(config: dict[str, Any]) -> dict[str, Any]:
    """Return the config with rotary_emb_base and rotary_pct, as before transformers 5."""
    settings = config.pop("rope_parameters")
    return config | {
        "rotary_emb_base": settings["rope_theta"],
        "rotary_pct": settings["partial_rotary_factor"],
    }


CASES = [
    Case("gptneox, exact gelu", "GPTNeoXForCausalLM", SMALL),
    Case(
        "gptneox, serial blocks, tied, old spelling",
        "GPTNeoXForCausalLM",
        SMALL
        | {
            "hidden_act": "gelu_new",
            "use_parallel_residual": False,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 20000.0,
                "partial_rotary_factor": 0.5,
            },
        },
        config=old_spelling,
    ),
]
