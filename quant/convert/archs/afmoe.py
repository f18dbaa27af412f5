"""AFMoE (Trinity): norms before and after attention and feed-forward, a gate of the attention, a
sliding window on all layers except every fourth one, rotary positions only in layers with a
window, a few dense layers, then layers with routed and shared experts.

Follows AfmoeModel of llama.cpp (conversion/afmoe.py, src/models/afmoe.cpp), which always multiplies
the embedding by the square root of hidden_size.
"""

from dataclasses import replace

from quant.checkpoint.config import CheckpointConfig
from quant.checkpoint.safetensors import Tensors
from quant.convert.parts import block_tensors, checks, experts, layout, metadata, routers
from quant.convert.parts.base import Arch, ArchKey, Shapes

PERIOD_LAYERS = 4  # the last layer of each period attends to all positions
DEFAULTS = {  # defaults of transformers' AfmoeConfig
    "head_dim": 128,
    "rms_norm_eps": 1e-5,
    "sliding_window": 1024,
    "global_attn_every_n_layers": PERIOD_LAYERS,
    "moe_intermediate_size": 1408,
    "num_dense_layers": 1,
    "num_experts": 64,
    "num_experts_per_tok": 6,
    "num_shared_experts": 2,
    "route_scale": 1.0,
}


def normalize(config: CheckpointConfig) -> CheckpointConfig:
    """Return the config with the settings of experts under the names that DeepSeek uses. The class
    has no groups of experts and normalizes the weights of the chosen ones, whatever config.json
    says.
    """
    values = dict(config.values)
    for name in ("n_group", "topk_group"):
        values.pop(name, None)
    names = {
        "n_shared_experts": values["num_shared_experts"],
        "first_k_dense_replace": values["num_dense_layers"],
        "routed_scaling_factor": values["route_scale"],
        "norm_topk_prob": True,
    }
    return replace(config, values=values | names)


def check(config: CheckpointConfig) -> list[str]:
    """Raise UserError for settings that llama.cpp's afmoe computes differently. Return no notes."""
    layers = layout.sliding_layers(config, config.get_int("global_attn_every_n_layers"))
    pattern = [bool((layer + 1) % PERIOD_LAYERS) for layer in range(len(layers))]
    checks.raise_problems(
        config,
        [
            *checks.common_problems(config),
            *routers.router_problems(config, "sigmoid"),
            checks.problem_biases(config, "attention_bias"),
            (not config.get_bool("mup_enabled"), "its embedding is not scaled (mup_enabled)"),
            (config.values["sliding_window"] is None, "its sliding_window is null"),
            (
                layers != pattern,
                f"its layers are not windows except every {PERIOD_LAYERS}th one",
            ),
        ],
    )
    return []


def keys(config: CheckpointConfig) -> list[ArchKey]:
    """Return the common metadata keys, the width of the sliding window, and the keys of the
    experts.
    """
    return [
        *metadata.common_keys(config),
        ArchKey("attention.sliding_window", "uint32", config.get_int("sliding_window")),
        *routers.router_keys(config, experts.SIGMOID),
    ]


def required_shapes(config: CheckpointConfig) -> Shapes:
    """Return the shapes of all tensors that a converted model must have, rows first, by
    GGUF name.
    """
    count, _, head_dim = layout.head_counts(config)
    return (
        block_tensors.embedding_and_head(config)
        | block_tensors.repeat_for_blocks(
            config,
            block_tensors.attention_shapes(config),
            {"attn_gate.weight": (count * head_dim, config.get_int("hidden_size"))},
            block_tensors.head_norm_shapes(config),
            block_tensors.post_norm_shapes(config),
        )
        | routers.feed_forward_shapes(config, has_expert_bias=True)
    )


def prepare(config: CheckpointConfig, tensors: Tensors) -> Tensors:
    """Return the tensors with experts stacked and the router's bias renamed."""
    return block_tensors.rename_tensors(
        experts.stack_experts(config, tensors),
        lambda name: f"{name}.bias" if name.endswith(".mlp.expert_bias") else name,
    )


AFMOE = Arch(
    name="afmoe",
    kind="AFMOE",
    hf=("AfmoeForCausalLM",),
    keys=keys,
    required_shapes=required_shapes,
    check=check,
    defaults=DEFAULTS,
    normalize=normalize,
    prepare=prepare,
)

ARCHS = (AFMOE,)
