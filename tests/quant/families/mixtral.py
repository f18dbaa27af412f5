"""Mixtral with separate and with fused experts."""

from tests.quant.families import Case
from tests.quant.families.llama import LLAMA3, YARN, old_spelling

MOE = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}

CASES = [
    Case("mixtral, separate experts", "MixtralForCausalLM", MOE),
    Case("mixtral, fused experts", "MixtralForCausalLM", MOE, original=False),
    Case(
        "mixtral, tied, 4 query heads per key head, square heads",
        "MixtralForCausalLM",
        MOE | {"tie_word_embeddings": True, "num_key_value_heads": 2, "head_dim": 32},
    ),
    Case(
        "mixtral, yarn rope, old spelling",
        "MixtralForCausalLM",
        MOE | {"rope_parameters": YARN},
        config=old_spelling,
    ),
    Case("mixtral, llama 3 rope", "MixtralForCausalLM", MOE | {"rope_parameters": LLAMA3}),
]
