"""Mamba 2: state-space layers only."""

from tests.quant.families import Case

STATES = {
    "num_attention_heads": None,
    "num_key_value_heads": None,
    "intermediate_size": None,
    "num_heads": 16,
    "head_dim": 32,
    "state_size": 32,
    "n_groups": 2,
    "chunk_size": 64,
}

CASES = [
    Case("mamba2", "Mamba2ForCausalLM", STATES),
    Case(
        "mamba2, tied, one group, no bias of the convolution",
        "Mamba2ForCausalLM",
        STATES | {"tie_word_embeddings": True, "n_groups": 1, "use_conv_bias": False},
    ),
]
