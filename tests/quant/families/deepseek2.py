"""DeepSeek V2 and V3: queries compressed or not, dense layers first, groups, router's bias, yarn's
two lengths.
"""

from typing import Any

from tests.quant.families import Case

V2, V3 = "DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM"
SIZES = {
    "num_key_value_heads": 8,
    "head_dim": None,
    "q_lora_rank": 96,
    "kv_lora_rank": 64,
    "qk_rope_head_dim": 32,
    "qk_nope_head_dim": 48,
    "v_head_dim": 40,
    "n_routed_experts": 16,
    "n_shared_experts": 2,
    "moe_intermediate_size": 64,
    "num_experts_per_tok": 4,
    "first_k_dense_replace": 1,
    "num_hidden_layers": 3,
}
ONE = {"n_group": 1, "topk_group": 1}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "beta_fast": 32,
    "beta_slow": 1,
    "original_max_position_embeddings": 128,
}


def choosing(model: Any) -> None:
    """A bias of the choice that matters; it is a buffer, which starts as zeros."""
    for layer in model.model.layers:
        if hasattr(layer.mlp, "gate"):
            layer.mlp.gate.e_score_correction_bias.normal_(0, 0.3)


def v2(name: str, **settings: Any) -> Case:
    """A case of V2."""
    return Case(f"deepseek v2, {name}", V2, SIZES | ONE | settings)


def v3(name: str, *, original: bool = True, **settings: Any) -> Case:
    """A case of V3: four groups of experts, two of which a token chooses from."""
    return Case(
        f"deepseek v3, {name}",
        V3,
        SIZES | {"n_group": 4, "topk_group": 2} | settings,
        change=choosing,
        original=original,
    )


def stretched(**lengths: float) -> dict[str, Any]:
    """Rotary settings of a stretched model."""
    return {"rope_parameters": YARN | lengths}


CASES = [
    v2("compressed queries"),
    v2("plain queries, scaled experts", q_lora_rank=None, routed_scaling_factor=4.0),
    v2("tied, all layers mixed", tie_word_embeddings=True, first_k_dense_replace=0),
    v2("groups that are all chosen", n_group=4, topk_group=4, topk_method="group_limited_greedy"),
    v2("greedy in spite of groups", n_group=4, topk_group=2),
    v2("yarn as in V2-Lite", **stretched(mscale=0.707, mscale_all_dim=0.707)),
    v2("yarn that says no length", **stretched()),
    v3("groups"),
    v3("one group, weights as they are", **ONE, norm_topk_prob=False, routed_scaling_factor=1.5),
    v3("fused experts, no dense layer", original=False, first_k_dense_replace=0),
    v3("rotary halves", rope_interleave=False),
    v3("rotary halves, plain queries", rope_interleave=False, q_lora_rank=None),
    v3("other eps", rms_norm_eps=1e-5),
    v3("yarn as in V3", **stretched(mscale=1.0, mscale_all_dim=1.0)),
    v3("yarn of two lengths", **stretched(mscale=0.5, mscale_all_dim=1.2)),
    v3("yarn of a given length", **stretched(attention_factor=1.3)),
    v3(
        "yarn of all scores alike",
        **stretched(attention_factor=1.0 + 0.1 * 2.0794415416798357, mscale_all_dim=1.0),
    ),
]
