"""Jamba: state-space layers of the first Mamba, attention, feed-forwards and experts."""

from tests.quant.families import Case

HYBRID = {
    "num_hidden_layers": 4,
    "head_dim": None,
    "attn_layer_period": 4,
    "attn_layer_offset": 2,
    "expert_layer_period": 2,
    "expert_layer_offset": 1,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "mamba_d_state": 16,
}

CASES = [
    Case("jamba", "JambaForCausalLM", HYBRID),
    Case(
        "jamba, tied, fused experts, no bias of the convolution",
        "JambaForCausalLM",
        HYBRID | {"tie_word_embeddings": True, "mamba_conv_bias": False, "mamba_dt_rank": 24},
        original=False,
    ),
]
