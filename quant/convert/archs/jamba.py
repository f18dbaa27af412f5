"""Jamba: state-space layers of the first Mamba and a few attention layers without positions, each
followed by a feed-forward or by experts.

Follows JambaModel of llama.cpp (conversion/jamba.py, src/models/jamba.cpp).
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from quant.checkpoint.config import CheckpointConfig
from quant.checkpoint.safetensors import Tensors
from quant.convert.parts import block_tensors, checks, experts, layout, state_space
from quant.convert.parts.base import Arch, ArchKey, Shapes

if TYPE_CHECKING:
    from quant.native.ggml import F32

DEFAULTS: Mapping[str, Any] = {
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "max_position_embeddings": 262144,
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "expert_layer_period": 2,
    "expert_layer_offset": 1,
    "attn_layer_period": 8,
    "attn_layer_offset": 4,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_conv_bias": True,
}


def _layers_at(config: CheckpointConfig, name: str) -> list[bool]:
    """Return a list with one entry for each layer: whether it is at the offset in its period of the
    layers called `name`.
    """
    period, offset = config.get_int(f"{name}_period"), config.values.get(f"{name}_offset")
    return [layer % period == offset for layer in range(layout.layer_count(config))]


def attention_layers(config: CheckpointConfig) -> list[bool]:
    """Return a list with one entry for each layer: whether it has attention."""
    return _layers_at(config, "attn_layer")


def expert_layers(config: CheckpointConfig) -> list[bool]:
    """Return a list with one entry for each layer: whether it has experts."""
    has_experts = experts.expert_count(config) > 1
    return [has_experts and is_expert for is_expert in _layers_at(config, "expert_layer")]


def inner_width(config: CheckpointConfig) -> int:
    """Return the number of values in a state-space layer."""
    return config.get_int("mamba_expand") * config.get_int("hidden_size")


def step_rank(config: CheckpointConfig) -> int:
    """Return the width from which the time steps are computed."""
    rank = config.values.get("mamba_dt_rank")
    if rank in (None, "auto"):
        return -(-config.get_int("hidden_size") // 16)
    return config.get_int("mamba_dt_rank")


def check(config: CheckpointConfig) -> list[str]:
    """Raise UserError for settings that llama.cpp's jamba computes differently. Return no notes."""
    expand, activation = config.get_int("mamba_expand"), config.values.get("hidden_act")
    checks.raise_problems(
        config,
        [
            checks.problem_uneven_heads(config),
            checks.problem_head_width(config),
            (activation != "silu", f"its activation is {activation}"),
            (expand != 2, f"its mamba_expand is {expand}; llama.cpp supports 2"),
            (
                config.get_int("mamba_d_conv") < 2,
                "the convolution of its state-space layers has a kernel of 1",
            ),
            checks.problem_biases(config, "mamba_proj_bias"),
            *experts.expert_problems(config),
        ],
    )
    return []


def keys(config: CheckpointConfig) -> list[ArchKey]:
    """Return the metadata keys. State-space layers have 0 key-value heads."""
    count, kv_heads, _ = layout.head_counts(config)
    kv_counts = [kv_heads if attention else 0 for attention in attention_layers(config)]
    return [
        ArchKey("block_count", "uint32", layout.layer_count(config)),
        ArchKey("context_length", "uint32", config.get_int("max_position_embeddings")),
        ArchKey("embedding_length", "uint32", config.get_int("hidden_size")),
        ArchKey("feed_forward_length", "uint32", config.get_int("intermediate_size")),
        ArchKey("attention.head_count", "uint32", count),
        ArchKey("attention.head_count_kv", "array:int32", kv_counts),
        ArchKey("ssm.conv_kernel", "uint32", config.get_int("mamba_d_conv")),
        ArchKey("ssm.inner_size", "uint32", inner_width(config)),
        ArchKey("ssm.state_size", "uint32", config.get_int("mamba_d_state")),
        ArchKey("ssm.time_step_rank", "uint32", step_rank(config)),
        ArchKey("attention.layer_norm_rms_epsilon", "float32", config.get_float("rms_norm_eps")),
        *experts.expert_keys(config),
    ]


def required_shapes(config: CheckpointConfig) -> Shapes:
    """Return the shapes of all tensors that a converted model must have, rows first, by
    GGUF name.
    """
    attention, sparse = attention_layers(config), expert_layers(config)
    mixers = {True: block_tensors.attention_shapes(config), False: _state_shapes(config)}
    feed_forwards: dict[bool, Shapes] = {
        True: experts.sparse_feed_forward_shapes(config, config.get_int("intermediate_size")),
        False: block_tensors.feed_forward_shapes(config),
    }
    return block_tensors.embedding_and_head(config) | block_tensors.shapes_by_block(
        len(attention), lambda layer: mixers[attention[layer]] | feed_forwards[sparse[layer]]
    )


def _state_shapes(config: CheckpointConfig) -> Shapes:
    """Return the shapes of one state-space layer and the norm before it, by role."""
    hidden, inner, rank = config.get_int("hidden_size"), inner_width(config), step_rank(config)
    state = config.get_int("mamba_d_state")
    biases: Shapes = {"ssm_conv1d.bias": (inner,)} if has_conv_bias(config) else {}
    return biases | {
        "attn_norm.weight": (hidden,),
        "ssm_in.weight": (2 * inner, hidden),
        "ssm_conv1d.weight": (inner, config.get_int("mamba_d_conv")),
        "ssm_x.weight": (rank + 2 * state, inner),
        "ssm_dt.weight": (inner, rank),
        "ssm_dt.bias": (inner,),
        "ssm_dt_norm.weight": (rank,),
        "ssm_b_norm.weight": (state,),
        "ssm_c_norm.weight": (state,),
        "ssm_a": (inner, state),
        "ssm_d": (inner,),
        "ssm_out.weight": (hidden, inner),
    }


def has_conv_bias(config: CheckpointConfig) -> bool:
    """Return whether the convolutions have biases."""
    return config.get_bool("mamba_conv_bias", default=True)


def extra_tensors(config: CheckpointConfig) -> "dict[str, F32]":
    """Return biases of zero for convolutions without them. llama.cpp needs a bias."""
    import numpy as np

    if has_conv_bias(config):
        return {}
    return {
        f"blk.{layer}.ssm_conv1d.bias": np.zeros(inner_width(config), np.float32)
        for layer, is_attention in enumerate(attention_layers(config))
        if not is_attention
    }


def prepare(config: CheckpointConfig, tensors: Tensors) -> Tensors:
    """Return the tensors with experts stacked, the decay instead of its logarithm, and the
    convolutions without their middle axis.
    """
    result: Tensors = {}
    for name, tensor in tensors.items():
        if name.endswith(".mamba.A_log"):
            result[name] = state_space.negate_exp(tensor)
        elif name.endswith(".mamba.conv1d.weight"):
            result[name] = state_space.squeeze_kernel(tensor)
        else:
            result[name] = tensor
    return experts.stack_experts(config, result)


JAMBA = Arch(
    name="jamba",
    kind="JAMBA",
    hf=("JambaForCausalLM",),
    keys=keys,
    required_shapes=required_shapes,
    check=check,
    defaults=DEFAULTS,
    prepare=prepare,
    extra_tensors=extra_tensors,
)

ARCHS = (JAMBA,)
