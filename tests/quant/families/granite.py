"""Granite: Llama with multipliers of embeddings, attention, residuals and logits."""

from tests.quant.families import Case
from tests.quant.families.llama import LLAMA3, YARN, old_spelling

SCALES = {
    "head_dim": None,
    "embedding_multiplier": 6.0,
    "attention_multiplier": 0.1,
    "residual_multiplier": 0.3,
    "logits_scaling": 7.0,
}

CASES = [
    Case("granite, untied", "GraniteForCausalLM", SCALES),
    Case(
        "granite, tied, 4 query heads per key head",
        "GraniteForCausalLM",
        SCALES | {"tie_word_embeddings": True, "num_key_value_heads": 2},
    ),
    Case(
        "granite, default multipliers",
        "GraniteForCausalLM",
        {"head_dim": None},
        scale=0.04,
    ),
    Case(
        "granite, biases", "GraniteForCausalLM", SCALES | {"attention_bias": True, "mlp_bias": True}
    ),
    Case("granite, wide heads", "GraniteForCausalLM", SCALES | {"head_dim": 64}),
    Case(
        "granite, yarn rope, old spelling",
        "GraniteForCausalLM",
        SCALES | {"rope_parameters": YARN},
        config=old_spelling,
    ),
    Case("granite, llama 3 rope", "GraniteForCausalLM", SCALES | {"rope_parameters": LLAMA3}),
]
