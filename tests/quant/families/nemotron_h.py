"""Nemotron H: state-space, attention and feed-forward layers, or experts instead of the last."""

from typing import Any

from tests.quant.families import Case

HYBRID = {
    "num_hidden_layers": None,
    "layers_block_type": ["mamba", "mlp", "attention", "mamba", "mlp"],
    "head_dim": 48,
    "mamba_num_heads": 12,
    "mamba_head_dim": 32,
    "ssm_state_size": 32,
    "n_groups": 2,
    "chunk_size": 64,
}
EXPERTS = HYBRID | {
    "layers_block_type": ["mamba", "moe", "attention", "moe"],
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 96,
    "moe_shared_expert_intermediate_size": 160,
    "routed_scaling_factor": 2.5,
}
LETTERS = {"linear_attention": "M", "full_attention": "*", "mlp": "-", "moe": "E"}


def old_spelling(values: dict[str, Any]) -> dict[str, Any]:
    """Return the config with one letter for each layer, as in the first checkpoints."""
    kinds = values.pop("layers_block_type")
    pattern = "".join(LETTERS[kind] for kind in kinds)
    return values | {"hybrid_override_pattern": pattern, "num_hidden_layers": len(kinds)}


def set_router_bias(model: Any) -> None:
    """Give the routers a bias that changes which experts are used."""
    for name, value in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            value.normal_(0, 0.1)


CASES = [
    Case("nemotron_h", "NemotronHForCausalLM", HYBRID),
    Case(
        "nemotron_h, old spelling, biases",
        "NemotronHForCausalLM",
        HYBRID | {"mlp_bias": True},
        config=old_spelling,
    ),
    Case(
        "nemotron_h, no bias of the convolution",
        "NemotronHForCausalLM",
        HYBRID | {"use_conv_bias": False},
        original=False,
    ),
    Case("nemotron_h_moe", "NemotronHForCausalLM", EXPERTS, change=set_router_bias),
    Case(
        "nemotron_h_moe, latent, groups, fused experts",
        "NemotronHForCausalLM",
        EXPERTS | {"moe_latent_size": 64, "n_group": 2, "topk_group": 1, "norm_topk_prob": False},
        change=set_router_bias,
        original=False,
    ),
]
