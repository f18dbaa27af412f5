"""DeepSeek V2 and V3: compressed queries, dense layers, expert groups, router biases, YaRN."""

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
ONE_GROUP = {"n_group": 1, "topk_group": 1}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "beta_fast": 32,
    "beta_slow": 1,
    "original_max_position_embeddings": 128,
}


def randomize_router_biases(model: Any) -> None:
    """Set random router biases. They are buffers, which transformers initializes to 0."""
    for layer in model.model.layers:
        if hasattr(layer.mlp, "gate"):
            layer.mlp.gate.e_score_correction_bias.normal_(0, 0.3)


def v2(name: str, **settings: Any) -> Case:
    """Return a DeepSeek V2 case with these settings."""
    return Case(f"deepseek v2, {name}", V2, SIZES | ONE_GROUP | settings)


def v3(name: str, *, original: bool = True, **settings: Any) -> Case:
    """Return a DeepSeek V3 case: each token selects experts from two of four groups."""
    return Case(
        f"deepseek v3, {name}",
        V3,
        SIZES | {"n_group": 4, "topk_group": 2} | settings,
        change=randomize_router_biases,
        original=original,
    )


def yarn_settings(**factors: float) -> dict[str, Any]:
    """Return YaRN settings with these factors of transformers, such as `mscale`."""
    return {"rope_parameters": YARN | factors}


CASES = [
    v2("compressed queries"),
    v2("plain queries, scaled experts", q_lora_rank=None, routed_scaling_factor=4.0),
    v2("tied, all layers mixed", tie_word_embeddings=True, first_k_dense_replace=0),
    v2("all groups selected", n_group=4, topk_group=4, topk_method="group_limited_greedy"),
    v2("greedy selection despite groups", n_group=4, topk_group=2),
    v2("yarn as in V2-Lite", **yarn_settings(mscale=0.707, mscale_all_dim=0.707)),
    v2("yarn without mscale", **yarn_settings()),
    v3("groups"),
    v3(
        "one group, weights not normalized",
        **ONE_GROUP,
        norm_topk_prob=False,
        routed_scaling_factor=1.5,
    ),
    v3("fused experts, no dense layer", original=False, first_k_dense_replace=0),
    v3("rotary halves", rope_interleave=False),
    v3("rotary halves, plain queries", rope_interleave=False, q_lora_rank=None),
    v3("other eps", rms_norm_eps=1e-5),
    v3("yarn as in V3", **yarn_settings(mscale=1.0, mscale_all_dim=1.0)),
    v3("yarn with two mscales", **yarn_settings(mscale=0.5, mscale_all_dim=1.2)),
    v3("yarn with attention factor", **yarn_settings(attention_factor=1.3)),
    v3(
        "yarn with equal vector and score factors",
        **yarn_settings(attention_factor=1.0 + 0.1 * 2.0794415416798357, mscale_all_dim=1.0),
    ),
]
