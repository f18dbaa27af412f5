"""Granite with experts, separate from the first checkpoints or fused."""

from tests.quant.families import Case
from tests.quant.families.granite import SCALES

EXPERTS = SCALES | {
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "intermediate_size": 128,
}

CASES = [
    Case("granitemoe", "GraniteMoeForCausalLM", EXPERTS),
    Case(
        "granitemoe, tied, fused experts",
        "GraniteMoeForCausalLM",
        EXPERTS | {"tie_word_embeddings": True, "head_dim": 64},
        original=False,
    ),
]
