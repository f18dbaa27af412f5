"""Granite 4: state-space and attention layers, experts or a feed-forward, with and without rope."""

from typing import Any

from tests.quant.families import Case
from tests.quant.families.granite import SCALES

HYBRID = SCALES | {
    "num_hidden_layers": 4,
    "layer_types": ["mamba", "attention", "mamba", "mamba"],
    "mamba_n_heads": 16,
    "mamba_n_groups": 1,
    "mamba_d_state": 32,
    "mamba_d_head": 32,
    "mamba_chunk_size": 64,
    "num_local_experts": 0,
    "shared_intermediate_size": 384,
}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 128}
ATTENTION_ONLY = {"layer_types": ["attention"] * 4, "position_embedding_type": "rope"}


def old_spelling(values: dict[str, Any]) -> dict[str, Any]:
    """Return the config with the names of layers of the first checkpoints."""
    old = {"linear_attention": "mamba", "full_attention": "attention"}
    types = values.get("layer_types") or values["layers_block_type"]
    return values | {"layer_types": [old.get(kind, kind) for kind in types]}


CASES = [
    Case("granitehybrid", "GraniteMoeHybridForCausalLM", HYBRID),
    Case(
        "granitehybrid, experts, tied, two groups, old spelling",
        "GraniteMoeHybridForCausalLM",
        HYBRID | EXPERTS | {"tie_word_embeddings": True, "mamba_n_groups": 2},
        config=old_spelling,
    ),
    Case(
        "granitehybrid, fused experts, rope, no bias of the convolution",
        "GraniteMoeHybridForCausalLM",
        HYBRID | EXPERTS | {"position_embedding_type": "rope", "mamba_conv_bias": False},
        original=False,
    ),
    Case(
        "granitehybrid, attention only",
        "GraniteMoeHybridForCausalLM",
        HYBRID | ATTENTION_ONLY | {"intermediate_size": 64},
    ),
    Case(
        "granitehybrid, attention only, no rope",
        "GraniteMoeHybridForCausalLM",
        HYBRID | ATTENTION_ONLY | {"position_embedding_type": None, "attention_bias": True},
    ),
    Case(
        "granitehybrid, attention and experts only",
        "GraniteMoeHybridForCausalLM",
        HYBRID | ATTENTION_ONLY | EXPERTS,
    ),
]
