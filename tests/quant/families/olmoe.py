"""OLMoE: one key head for each query head."""

from tests.quant.families import Case
from tests.quant.families.llama import YARN, old_spelling

MOE = {
    "head_dim": None,
    "num_key_value_heads": 8,
    "intermediate_size": 192,
    "num_experts": 8,
    "num_experts_per_tok": 3,
}

CASES = [
    Case("olmoe, separate experts", "OlmoeForCausalLM", MOE),
    Case(
        "olmoe, fused experts, tied, other eps",
        "OlmoeForCausalLM",
        MOE | {"tie_word_embeddings": True, "rms_norm_eps": 1e-3},
        original=False,
    ),
    Case(
        "olmoe, yarn rope, old spelling",
        "OlmoeForCausalLM",
        MOE | {"rope_parameters": YARN},
        config=old_spelling,
    ),
]
