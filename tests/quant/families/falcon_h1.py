"""Falcon H1: attention beside a state-space layer, with multipliers everywhere."""

from tests.quant.families import Case
from tests.quant.families.llama import YARN

HYBRID = {
    "mamba_d_ssm": 384,
    "mamba_n_heads": 12,
    "mamba_d_head": 32,
    "mamba_n_groups": 2,
    "mamba_d_state": 32,
    "mamba_chunk_size": 64,
}
MULTIPLIERS = {
    "lm_head_multiplier": 0.4,
    "embedding_multiplier": 3.0,
    "mlp_multipliers": [0.9, 0.6],
    "key_multiplier": 0.7,
    "attention_in_multiplier": 1.2,
    "attention_out_multiplier": 0.8,
    "ssm_multipliers": [0.9, 0.5, 0.7, 1.1, 0.6],
    "ssm_in_multiplier": 1.3,
    "ssm_out_multiplier": 0.75,
}

CASES = [
    Case("falcon-h1", "FalconH1ForCausalLM", HYBRID | MULTIPLIERS),
    Case(
        "falcon-h1, tied, norm, no bias of the convolution",
        "FalconH1ForCausalLM",
        HYBRID
        | MULTIPLIERS
        | {
            "tie_word_embeddings": True,
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": False,
            "mamba_conv_bias": False,
            "head_dim": None,
        },
    ),
    Case(
        "falcon-h1, tied, default multipliers, width from expand, yarn rope",
        "FalconH1ForCausalLM",
        HYBRID
        | {
            "tie_word_embeddings": True,
            "mamba_d_ssm": None,
            "mamba_d_head": "auto",
            "mamba_n_heads": 16,
            "rope_parameters": YARN,
        },
    ),
]
