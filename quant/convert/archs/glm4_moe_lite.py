"""GLM 4.7 Flash (Glm4MoeLite): the attention and experts of DeepSeek V3 in other sizes.

Follows Glm4MoeLiteModel of llama.cpp (conversion/glm.py), which uses src/models/deepseek2.cpp. The
dense layers are those in mlp_layer_types; without it, the first layer is dense.
"""

from dataclasses import replace

from quant.checkpoint.config import CheckpointConfig
from quant.convert.archs import deepseek2
from quant.convert.parts import checks, layout, routers

DEFAULTS = {  # defaults of transformers' Glm4MoeLiteConfig
    "num_attention_heads": 20,
    "num_key_value_heads": 20,
    "kv_lora_rank": 512,
    "q_lora_rank": 768,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
    "rms_norm_eps": 1e-5,
    "moe_intermediate_size": 1536,
    "n_shared_experts": 1,
    "n_routed_experts": 64,
    "num_experts_per_tok": 4,
    "routed_scaling_factor": 1.8,
    "norm_topk_prob": True,
}


def normalize(config: CheckpointConfig) -> CheckpointConfig:
    """Return the config with the number of dense layers in DeepSeek's setting
    first_k_dense_replace, which transformers does not read for this class.
    """
    return read_mlp_types(replace(config, values={**config.values, "first_k_dense_replace": 1}))


def read_mlp_types(config: CheckpointConfig) -> CheckpointConfig:
    """Return the config with the number of dense layers in first_k_dense_replace, as the number of
    dense entries at the beginning of mlp_layer_types. Without this list, the config is unchanged.
    """
    types = config.values.get("mlp_layer_types")
    if not isinstance(types, list):
        return config
    count = next((layer for layer, kind in enumerate(types) if kind != "dense"), len(types))
    return replace(config, values={**config.values, "first_k_dense_replace": count})


def problem_mlp_types(config: CheckpointConfig) -> tuple[object, str]:
    """Return the problem (condition, text) that mlp_layer_types has dense layers after sparse
    ones.
    """
    types, layers = config.values.get("mlp_layer_types"), layout.layer_count(config)
    count = routers.dense_layer_count(config)
    mixed = types is not None and types != ["dense"] * count + ["sparse"] * (layers - count)
    return mixed, "its mlp_layer_types are not dense layers, followed by sparse ones"


def check(config: CheckpointConfig) -> list[str]:
    """Raise UserError for settings that llama.cpp's deepseek2 computes differently; return notes
    for the user.
    """
    checks.raise_problems(config, [problem_mlp_types(config)])
    return deepseek2.check_v3(config)


GLM4_MOE_LITE = replace(
    deepseek2.V3,
    hf=("Glm4MoeLiteForCausalLM",),
    check=check,
    defaults=DEFAULTS,
    normalize=normalize,
)

ARCHS = (GLM4_MOE_LITE,)
