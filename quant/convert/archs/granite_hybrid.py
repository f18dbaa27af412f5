"""Granite 4: state-space layers of Mamba 2 and a few attention layers, each followed by a
feed-forward, by experts and a shared expert, or by a shared expert alone.

Follows GraniteHybridModel of llama.cpp (conversion/granite.py, src/models/granite-hybrid.cpp).
Models that have attention layers only become granite or granitemoe, as there. Differences: the
rotary positions follow position_embedding_type, the context length is that of config.json, and
models without state-space layers have no keys of them.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from quant.checkpoint.config import CheckpointConfig
from quant.checkpoint.safetensors import Tensors
from quant.convert.archs import granite, granite_moe
from quant.convert.parts import block_tensors, checks, layout, rope, state_space
from quant.convert.parts.base import Arch, ArchKey, Shapes
from quant.convert.parts.state_space import Mamba2Widths

if TYPE_CHECKING:
    from quant.native.ggml import F32

DENSE_NAMES = {
    "shared_mlp.gate": "ffn_gate",
    "shared_mlp.up": "ffn_up",
    "shared_mlp.down": "ffn_down",
}
DEFAULTS: Mapping[str, Any] = {
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "shared_intermediate_size": 1024,
    "mamba_n_heads": 128,
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_conv_bias": True,
}


def is_dense(config: CheckpointConfig) -> bool:
    """Return whether the model has no experts. Then the shared expert is its feed-forward."""
    return config.values.get("num_local_experts") in (None, 0)


def attention_layers(config: CheckpointConfig) -> list[bool]:
    """Return a list with one entry for each layer: whether it is an attention layer, otherwise it
    is a state-space layer. Raises UserError if the setting is malformed.
    """
    setting = "layer_types" if "layer_types" in config.values else "layers_block_type"
    if config.values.get(setting) is None:
        return [False] * layout.layer_count(config)
    return layout.layers_of_kind(
        config, setting, state_space.ATTENTION_KINDS, state_space.RECURRENT_KINDS
    )


def widths(config: CheckpointConfig) -> Mamba2Widths:
    """Return the widths of the state-space layers that config.json describes."""
    return Mamba2Widths(
        inner=config.get_int("mamba_expand") * config.get_int("hidden_size"),
        state=config.get_int("mamba_d_state"),
        groups=config.get_int("mamba_n_groups"),
        heads=config.get_int("mamba_n_heads"),
        kernel=config.get_int("mamba_d_conv"),
    )


def check(config: CheckpointConfig) -> list[str]:
    """Raise UserError for settings that llama.cpp's granitehybrid computes differently. Return no
    notes.
    """
    sizes = widths(config)
    checks.raise_problems(
        config,
        [
            *_common_problems(config),
            *state_space.width_problems(sizes),
            state_space.problem_step_limit(config),
            (
                config.get_int("mamba_expand") != 2,
                f"its mamba_expand is {config.get_int('mamba_expand')}; llama.cpp supports 2",
            ),
            checks.problem_biases(config, "mamba_proj_bias"),
        ],
    )
    return []


def check_attention_only(config: CheckpointConfig) -> list[str]:
    """Raise UserError for settings that llama.cpp's granite or granitemoe compute differently for
    a model without state-space layers. Return no notes.
    """
    checks.raise_problems(
        config,
        [
            *_common_problems(config),
            (
                not is_dense(config) and not has_rotary_positions(config),
                "its attention layers have no rotary positions",
            ),
        ],
    )
    return []


def _common_problems(config: CheckpointConfig) -> list[tuple[object, str]]:
    kind = config.values.get("position_embedding_type")
    return [
        *(
            checks.common_problems(config, rope_types=rope.ROPE_TYPES_WITH_FACTORS)
            if is_dense(config)
            else granite_moe.expert_problems(config)
        ),
        (kind not in (None, "rope", "nope"), f"its position_embedding_type is {kind}"),
    ]


def has_rotary_positions(config: CheckpointConfig) -> bool:
    """Return whether the attention layers have rotary positions."""
    return config.values.get("position_embedding_type") == "rope"


def keys_attention_only(config: CheckpointConfig) -> list[ArchKey]:
    """Return the metadata keys of a model without state-space layers."""
    rotary = ArchKey("rope.scaling.finetuned", "bool", has_rotary_positions(config))
    if is_dense(config):
        return [*granite.keys(_dense(config)), rotary]
    return [*granite_moe.keys(config), rotary]


def keys(config: CheckpointConfig) -> list[ArchKey]:
    """Return the metadata keys of a model with state-space layers, which have 0 key-value heads."""
    kv_heads = layout.head_counts(config)[1]
    counts = [kv_heads if attention else 0 for attention in attention_layers(config)]
    return [
        *(
            ArchKey(key.name, "array:int32", counts)
            if key.name == "attention.head_count_kv"
            else key
            for key in keys_attention_only(config)
        ),
        *state_space.state_keys(widths(config)),
    ]


def _dense(config: CheckpointConfig) -> CheckpointConfig:
    """Return the config with the width of the shared expert as the feed-forward's."""
    width = granite_moe.shared_width(config) or config.values.get("intermediate_size")
    return replace(config, values={**config.values, "intermediate_size": width})


def required_shapes(config: CheckpointConfig) -> Shapes:
    """Return the shapes of all tensors that a converted model must have, rows first, by
    GGUF name.
    """
    hidden, attention = config.get_int("hidden_size"), attention_layers(config)
    feed_forward = (
        block_tensors.feed_forward_shapes(_dense(config))
        if is_dense(config)
        else granite_moe.expert_shapes(config)
    )
    attention_shapes = block_tensors.attention_shapes(config)
    recurrent_shapes: Shapes = {}
    if not all(attention):
        recurrent_shapes = {
            "attn_norm.weight": (hidden,),
            **state_space.state_shapes(widths(config), hidden, has_conv_bias(config)),
        }
    return block_tensors.embedding_and_head(config) | block_tensors.shapes_by_block(
        len(attention),
        lambda layer: (attention_shapes if attention[layer] else recurrent_shapes) | feed_forward,
    )


def has_conv_bias(config: CheckpointConfig) -> bool:
    """Return whether the convolutions have biases."""
    return config.get_bool("mamba_conv_bias", default=True)


def extra_tensors(config: CheckpointConfig) -> "dict[str, F32]":
    """Return the factors of scaled rope, and biases of zero for convolutions without them."""
    recurrent = [
        layer for layer, is_attention in enumerate(attention_layers(config)) if not is_attention
    ]
    biases = (
        {}
        if not recurrent or has_conv_bias(config)
        else state_space.zero_biases(widths(config), recurrent)
    )
    return rope.llama3_rope_factors(config) | biases


def optional_shapes(config: CheckpointConfig) -> Shapes:
    """Return the shapes of the biases that attention layers can have."""
    attention = attention_layers(config)
    biases = block_tensors.qkv_bias_shapes(config) | {
        "attn_output.bias": (config.get_int("hidden_size"),)
    }
    return block_tensors.shapes_by_block(
        len(attention), lambda layer: biases if attention[layer] else {}
    )


def prepare(config: CheckpointConfig, tensors: Tensors) -> Tensors:
    """Return the tensors with gates and ups in separate tensors, and those of the state-space
    layers as llama.cpp stores them.
    """
    mixers = state_space.prepare_mixers(config.get_int("mamba_n_groups"), tensors)
    if is_dense(config):
        config = replace(config, values={**config.values, "num_local_experts": 1})
    return granite_moe.prepare(config, mixers)


def select(config: CheckpointConfig) -> Arch:
    """Return the family that the layers of config.json need."""
    arch = HYBRID
    if all(attention_layers(config)):
        arch = GRANITE if is_dense(config) else GRANITE_MOE
    return replace(arch, names=DENSE_NAMES) if is_dense(config) else arch


HYBRID = replace(
    granite.GRANITE,
    name="granitehybrid",
    kind="GRANITE_HYBRID",
    hf=("GraniteMoeHybridForCausalLM",),
    keys=keys,
    required_shapes=required_shapes,
    optional_shapes=optional_shapes,
    check=check,
    prepare=prepare,
    extra_tensors=extra_tensors,
    names=granite_moe.EXPERT_NAMES,
    defaults=DEFAULTS,
    select=select,
)
GRANITE = replace(
    HYBRID, name="granite", kind="GRANITE", keys=keys_attention_only, check=check_attention_only
)
GRANITE_MOE = replace(GRANITE, name="granitemoe", kind="GRANITE_MOE")

ARCHS = (HYBRID,)
