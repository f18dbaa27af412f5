"""GPT-2: tied and untied, and another width of the feed-forward."""

from typing import Any

from tests.quant.families import Case

SMALL: dict[str, Any] = {
    "head_dim": None,
    "num_key_value_heads": None,
    "intermediate_size": None,
    "tie_word_embeddings": True,
}

CASES = [
    Case("gpt2, tied", "GPT2LMHeadModel", SMALL),
    Case(
        "gpt2, untied, narrow feed-forward",
        "GPT2LMHeadModel",
        SMALL | {"tie_word_embeddings": False, "n_inner": 512},
    ),
]
