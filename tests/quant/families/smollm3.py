"""SmolLM3: every fourth layer has no rotary embedding, so the model has five layers."""

from tests.quant.families import Case
from tests.quant.families.llama import YARN, old_spelling

DEEP = {"head_dim": None, "num_hidden_layers": 5, "pad_token_id": 0}

CASES = [
    Case("smollm3, untied", "SmolLM3ForCausalLM", DEEP),
    Case(
        "smollm3, tied, 4 query heads per key head",
        "SmolLM3ForCausalLM",
        DEEP | {"tie_word_embeddings": True, "num_key_value_heads": 2},
    ),
    Case("smollm3, wide heads", "SmolLM3ForCausalLM", DEEP | {"head_dim": 64}),
    Case(
        "smollm3, yarn rope, old spelling",
        "SmolLM3ForCausalLM",
        DEEP | {"rope_parameters": YARN},
        config=old_spelling,
    ),
]
