"""Llama 4 (text part): three layers with rotary positions and attention in chunks, then a layer
without positions; experts in every layer or in every second one.

Follows conversion/llama.py (Llama4Model) and src/models/llama4.cpp of llama.cpp. The graph fixes
the chunk size and the scale of queries in layers without positions, and normalizes queries and keys
unless there are 128 experts. Rotary pairs are interleaved in the checkpoint already. intermediate_size
is the width of an expert, intermediate_size_mlp that of a dense layer.
"""

from dataclasses import replace
from typing import Any

from quant.checkpoint import tensor_views
from quant.checkpoint.config import CheckpointConfig
from quant.checkpoint.safetensors import Tensors
from quant.convert.archs import llama
from quant.convert.parts import block_tensors, checks, experts, layout, rope
from quant.convert.parts.base import ArchKey, Shapes, no_tensors

PERIOD_LAYERS = 4  # the last layer of each period has no positions and attends to everything
EXPERTS_WITHOUT_NORMS = 128  # llama.cpp takes a model with so many experts for the 17B-128E
# What llama.cpp computes with, whatever the metadata say.
FIXED_SETTINGS = {
    "attention_chunk_size": 8192,
    "floor_scale": 8192,
    "attn_scale": 0.1,
}
DEFAULTS: dict[str, Any] = {  # defaults of transformers' Llama4TextConfig
    "vocab_size": 202048,
    "hidden_size": 5120,
    "intermediate_size": 8192,
    "intermediate_size_mlp": 16384,
    "num_hidden_layers": 48,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "num_experts_per_tok": 1,
    "num_local_experts": 16,
    "interleave_moe_layer_step": 1,
    "use_qk_norm": True,
    "no_rope_layer_interval": 4,
    "attn_temperature_tuning": True,
    **FIXED_SETTINGS,
}


def with_dense_width(config: CheckpointConfig) -> CheckpointConfig:
    """Return the config with the width of a dense layer as intermediate_size."""
    width = config.get_int("intermediate_size_mlp")
    return replace(config, values={**config.values, "intermediate_size": width})


def has_experts(config: CheckpointConfig, layer: int) -> bool:
    """Return whether the layer with this number has experts."""
    return (layer + 1) % config.get_int("interleave_moe_layer_step") == 0


def check(config: CheckpointConfig) -> list[str]:
    """Raise UserError for settings that llama.cpp's llama4 computes differently. Return no
    notes.
    """
    values, count = config.values, layout.layer_count(config)
    rotary = [int((layer + 1) % PERIOD_LAYERS != 0) for layer in range(count)]
    interval = config.get_int("no_rope_layer_interval")
    stored_rotary = values.get("no_rope_layers") or [
        int((layer + 1) % interval != 0) for layer in range(count)
    ]
    types = ["chunked_attention" if is_rotary else "full_attention" for is_rotary in rotary]
    sparse = [layer for layer in range(count) if has_experts(config, layer)]
    has_norms = experts.expert_count(config) != EXPERTS_WITHOUT_NORMS
    checks.raise_problems(
        config,
        [
            *checks.common_problems(config, rope_types=rope.ROPE_TYPES_WITH_FACTORS),
            *experts.expert_problems(config),
            *(
                (values.get(key) != value, f"its {key} is {values.get(key)}, not {value}")
                for key, value in FIXED_SETTINGS.items()
            ),
            (
                not values.get("attn_temperature_tuning"),
                "its queries are not scaled (attn_temperature_tuning)",
            ),
            (
                stored_rotary != rotary,
                f"its no_rope_layers do not leave positions out in every {PERIOD_LAYERS}th layer",
            ),
            (
                values.get("layer_types") not in (None, types),
                "its layer_types differ from its no_rope_layers",
            ),
            (
                values.get("moe_layers") not in (None, sparse),
                "its moe_layers differ from its interleave_moe_layer_step",
            ),
            (
                config.get_bool("use_qk_norm") is not has_norms,
                f"use_qk_norm is {values.get('use_qk_norm')} in a model of "
                f"{experts.expert_count(config)} experts",
            ),
            checks.problem_biases(config, "attention_bias"),
        ],
    )
    return []


def keys(config: CheckpointConfig) -> list[ArchKey]:
    """Return the keys of a Llama, then those of the experts."""
    step = config.get_int("interleave_moe_layer_step")
    return [
        *llama.keys(with_dense_width(config)),
        *experts.expert_keys(config),
        ArchKey("interleave_moe_layer_step", "uint32", step),
        ArchKey("expert_feed_forward_length", "uint32", config.get_int("intermediate_size")),
    ]


def required_shapes(config: CheckpointConfig) -> Shapes:
    """Return the shapes of all tensors that a converted model must have, rows first, by
    GGUF name.
    """
    width = config.get_int("intermediate_size")
    attention, dense = (
        block_tensors.attention_shapes(config),
        block_tensors.feed_forward_shapes(with_dense_width(config)),
    )
    sparse = experts.sparse_feed_forward_shapes(config, width) | experts.shared_expert_shapes(
        config, width
    )
    return block_tensors.embedding_and_head(config) | block_tensors.shapes_by_block(
        layout.layer_count(config),
        lambda layer: attention | (sparse if has_experts(config, layer) else dense),
    )


def prepare(config: CheckpointConfig, tensors: Tensors) -> Tensors:
    """Return the tensors with experts transposed to `[experts, outputs, inputs]`, and with gates
    and ups split.
    """
    transposed = {
        name: tensor_views.transpose(tensor)
        if ".experts." in name and len(tensor.shape) == 3
        else tensor
        for name, tensor in tensors.items()
    }
    return experts.stack_experts(config, transposed)


LLAMA4 = replace(
    llama.LLAMA,
    name="llama4",
    kind="LLAMA4",
    hf=("Llama4ForCausalLM", "Llama4ForConditionalGeneration"),
    keys=keys,
    required_shapes=required_shapes,
    optional_shapes=no_tensors,
    check=check,
    defaults=DEFAULTS,
    prepare=prepare,
    ops={},
    names={
        "feed_forward.experts.gate_proj": "ffn_gate_exps",
        "feed_forward.experts.up_proj": "ffn_up_exps",
        "feed_forward.experts.down_proj": "ffn_down_exps",
    },
)

ARCHS = (LLAMA4,)
