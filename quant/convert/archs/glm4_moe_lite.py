"""GLM 4.7 Flash (Glm4MoeLite): the attention and experts of DeepSeek V3 in other sizes.

Follows Glm4MoeLiteModel of llama.cpp (conversion/glm.py), which uses src/models/deepseek2.cpp. The
dense layers are those in mlp_layer_types; without it, the first layer is dense.
"""

from dataclasses import replace

from quant.checkpoint.config import CheckpointConfig
from quant.convert.archs import blocks, deepseek2
from quant.convert.archs.base import ArchKey, Shapes

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


def with_dense_layers(config: CheckpointConfig) -> CheckpointConfig:
    """Return the config with the number of dense layers in DeepSeek's setting
    first_k_dense_replace.
    """
    types = config.values.get("mlp_layer_types")
    count = 1
    if isinstance(types, list):
        count = next((layer for layer, kind in enumerate(types) if kind != "dense"), len(types))
    return replace(config, values={**config.values, "first_k_dense_replace": count})


def check(config: CheckpointConfig) -> list[str]:
    """Raise UserError for settings that llama.cpp's deepseek2 computes differently; return notes
    for the user.
    """
    types, layers = config.values.get("mlp_layer_types"), blocks.layer_count(config)
    count = deepseek2.dense_layer_count(with_dense_layers(config))
    blocks.raise_problems(
        config,
        [
            (
                types is not None and types != ["dense"] * count + ["sparse"] * (layers - count),
                "its mlp_layer_types are not dense layers, followed by sparse ones",
            )
        ],
    )
    return deepseek2.V3.check(with_dense_layers(config))


def keys(config: CheckpointConfig) -> list[ArchKey]:
    """Return DeepSeek V3's metadata keys."""
    return deepseek2.V3.keys(with_dense_layers(config))


def required_shapes(config: CheckpointConfig) -> Shapes:
    """Return the shapes of all tensors that a converted model must have, rows first, by
    GGUF name.
    """
    return deepseek2.V3.required_shapes(with_dense_layers(config))


GLM4_MOE_LITE = replace(
    deepseek2.V3,
    hf=("Glm4MoeLiteForCausalLM",),
    keys=keys,
    required_shapes=required_shapes,
    check=check,
    defaults=DEFAULTS,
)

ARCHS = (GLM4_MOE_LITE,)
