"""K-EXAONE (EXAONE with experts): a norm of each query head and each key head, a sliding window on
all layers except every fourth one, rotary positions only in layers with a window, a few dense
layers, then layers with routed and shared experts.

Follows ExaoneMoEModel of llama.cpp (conversion/exaone.py, src/models/exaone-moe.cpp). Layers that
predict further tokens (MTP), which llama.cpp does not run, are not converted.
"""

from dataclasses import replace

from quant.checkpoint.config import CheckpointConfig
from quant.checkpoint.safetensors import Tensors
from quant.convert.archs import exaone4
from quant.convert.archs.glm4_moe_lite import problem_mlp_types, read_mlp_types
from quant.convert.parts import block_tensors, checks, experts, metadata, rope, routers
from quant.convert.parts.base import Arch, ArchKey, Shapes

DEFAULTS = {  # defaults of transformers' ExaoneMoeConfig
    "num_key_value_heads": 32,
    "rms_norm_eps": 1e-5,
    "sliding_window": 4096,
    "sliding_window_pattern": exaone4.PERIOD_LAYERS,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 1024,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "num_shared_experts": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
}


def normalize(config: CheckpointConfig) -> CheckpointConfig:
    """Return the config with the numbers of dense layers and of shared experts under the names that
    DeepSeek uses.
    """
    values = {**config.values, "n_shared_experts": config.values["num_shared_experts"]}
    return read_mlp_types(replace(config, values=values))


def check(config: CheckpointConfig) -> list[str]:
    """Raise UserError for settings that llama.cpp's exaone-moe computes differently; return notes
    for the user.
    """
    checks.raise_problems(
        config,
        [
            *checks.common_problems(config, rope_types=("default", "llama3")),
            *routers.router_problems(config, "sigmoid"),
            problem_mlp_types(config),
            (
                config.values["sliding_window"] is None or not any(exaone4.sliding_layers(config)),
                "none of its layers has a sliding window",
            ),
        ],
    )
    if config.values.get("num_nextn_predict_layers"):
        return ["layers that predict further tokens (MTP) are not converted"]
    return []


def keys(config: CheckpointConfig) -> list[ArchKey]:
    """Return the common metadata keys, those of the sliding window, and those of the experts."""
    width = config.get_int("moe_intermediate_size") * config.get_int("n_shared_experts")
    return [
        *metadata.common_keys(config),
        *metadata.sliding_window_keys(
            config, exaone4.sliding_layers(config), exaone4.PERIOD_LAYERS
        ),
        *routers.router_keys(config, experts.SIGMOID),
        ArchKey("expert_shared_feed_forward_length", "uint32", width),
    ]


def required_shapes(config: CheckpointConfig) -> Shapes:
    """Return the shapes of all tensors that a converted model must have, rows first, by
    GGUF name.
    """
    return (
        block_tensors.embedding_and_head(config)
        | block_tensors.repeat_for_blocks(
            config, block_tensors.attention_shapes(config), block_tensors.head_norm_shapes(config)
        )
        | routers.feed_forward_shapes(config, has_expert_bias=True)
    )


def prepare(config: CheckpointConfig, tensors: Tensors) -> Tensors:
    """Return the tensors with experts stacked and the router's bias renamed. The MTP layers are
    left out.
    """
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith("mtp.")}
    return experts.stack_experts_and_name_biases(config, kept)


EXAONE_MOE = Arch(
    name="exaone-moe",
    kind="EXAONE_MOE",
    hf=("ExaoneMoeForCausalLM",),
    keys=keys,
    required_shapes=required_shapes,
    check=check,
    defaults=DEFAULTS,
    normalize=normalize,
    prepare=prepare,
    extra_tensors=rope.llama3_rope_factors,
    needs_head=True,
)

ARCHS = (EXAONE_MOE,)
