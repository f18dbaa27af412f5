"""Qwen3-Next: three of four layers have linear attention (a gated delta rule with a convolution),
the others grouped-query attention with a gate. Every layer has experts and one shared expert.

Follows Qwen3NextModel of llama.cpp (conversion/qwen.py, src/models/qwen3next.cpp). The checkpoint
stores the weights of norms minus one, except the norm inside linear attention, and the rows of
queries, keys, values and gates of linear attention by key head. llama.cpp also writes
full_attention_interval when layer_types, which takes precedence, is the only one in config.json.
"""

from dataclasses import replace
from typing import Any

from quant.checkpoint import tensor_views
from quant.checkpoint.config import CheckpointConfig
from quant.checkpoint.safetensors import LazyTensor, Tensors
from quant.convert.archs.qwen2_moe import expert_keys, gated_expert_shapes, problem_dense_blocks
from quant.convert.parts import (
    block_tensors,
    checks,
    experts,
    layout,
    metadata,
    prediction,
    rope,
    state_space,
)
from quant.convert.parts.base import Arch, ArchKey, Shapes, TensorOp

DELTA_RULE_EPS = 1e-6  # eps in transformers of the norms of queries and keys of linear attention

LINEAR_DEFAULTS: dict[str, Any] = {
    "partial_rotary_factor": 0.25,
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}


def linear_layers(config: CheckpointConfig) -> list[bool]:
    """Return for each layer whether it has linear attention. Without layer_types in the config,
    these are all layers except each one with a number that is a multiple of
    full_attention_interval.

    Raises UserError if layer_types is malformed.
    """
    if config.values.get("layer_types") is None:
        interval = full_attention_interval(config)
        return [bool((layer + 1) % interval) for layer in range(layout.layer_count(config))]
    return layout.layers_of_kind(config, "layer_types", ("linear_attention",), ("full_attention",))


def full_attention_interval(config: CheckpointConfig) -> int:
    """Return after how many layers a layer without linear attention comes by default."""
    return config.get_int("full_attention_interval", default=4)


def head_counts(config: CheckpointConfig) -> tuple[int, int, int]:
    """Return the numbers of key heads and value heads of linear attention, and the width of each
    head in values.
    """
    return (
        config.get_int("linear_num_key_heads"),
        config.get_int("linear_num_value_heads"),
        config.get_int("linear_key_head_dim"),
    )


def linear_problems(config: CheckpointConfig) -> list[tuple[object, str]]:
    """Return the problems (see checks.py) of linear attention and of attention with a gate."""
    key_heads, value_heads, width = head_counts(config)
    return [
        (
            len(set(linear_layers(config))) < 2,
            "its layers are all of one kind, with or without linear attention",
        ),
        (
            config.get_int("linear_value_head_dim") != width,
            "the keys and values of its linear attention have different widths",
        ),
        (
            value_heads % key_heads,
            f"{value_heads} value heads of its linear attention cannot share {key_heads} key heads",
        ),
        checks.problem_biases(config, "attention_bias"),
    ]


def linear_notes(config: CheckpointConfig) -> list[str]:
    """Return a note if llama.cpp computes the norms of linear attention with another eps."""
    return checks.eps_notes(config, "queries and keys of linear attention", DELTA_RULE_EPS)


def check(config: CheckpointConfig) -> list[str]:
    """Raise UserError for settings that llama.cpp's qwen3next computes differently; return notes
    for the user. A false norm_topk_prob is refused because llama.cpp always normalizes the weights
    of the chosen experts.
    """
    checks.raise_problems(
        config,
        [
            *checks.common_problems(config, allow_partial_rotary=True),
            *linear_problems(config),
            *experts.expert_problems(config),
            *problem_dense_blocks(config),
            (not config.get_bool("norm_topk_prob"), "norm_topk_prob is false"),
        ],
    )
    return linear_notes(config)


def linear_keys(config: CheckpointConfig) -> list[ArchKey]:
    """Return the metadata keys of linear attention and of the layers that have it."""
    key_heads, value_heads, width = head_counts(config)
    entries = [
        ArchKey("ssm.conv_kernel", "uint32", config.get_int("linear_conv_kernel_dim")),
        ArchKey("ssm.state_size", "uint32", width),
        ArchKey("ssm.group_count", "uint32", key_heads),
        ArchKey("ssm.time_step_rank", "uint32", value_heads),
        ArchKey("ssm.inner_size", "uint32", width * value_heads),
    ]
    if config.values.get("layer_types") is not None:
        others = [False] * prediction.layer_count(config)
        entries.append(
            ArchKey("attention.recurrent_layers", "array:bool", linear_layers(config) + others)
        )
    return [
        *entries,
        ArchKey("full_attention_interval", "uint32", full_attention_interval(config)),
        ArchKey("rope.dimension_count", "uint32", rope.rotary_width(config)),
    ]


def common_keys(config: CheckpointConfig) -> list[ArchKey]:
    """Return the common metadata keys. A mixture of experts may have no intermediate_size, and then
    gets no key for it.
    """
    if config.values.get("intermediate_size") is not None:
        return metadata.common_keys(config)
    filled = replace(config, values={**config.values, "intermediate_size": 1})
    return [key for key in metadata.common_keys(filled) if key.name != "feed_forward_length"]


def keys(config: CheckpointConfig) -> list[ArchKey]:
    """Return the common metadata keys, then those of the experts and of linear attention."""
    return [*common_keys(config), *expert_keys(config), *linear_keys(config)]


def norm_shapes(config: CheckpointConfig) -> Shapes:
    """Return the shapes of one block's norms before attention and before feed-forward, by role."""
    hidden = config.get_int("hidden_size")
    return {"attn_norm.weight": (hidden,), "post_attention_norm.weight": (hidden,)}


def gated_attention_shapes(config: CheckpointConfig) -> Shapes:
    """Return the shapes of one block's attention, by role. The rows of attn_q are the queries and
    the gates of each head.
    """
    count, _, head_dim = layout.head_counts(config)
    hidden = config.get_int("hidden_size")
    return (
        block_tensors.attention_shapes(config)
        | {"attn_q.weight": (2 * count * head_dim, hidden)}
        | block_tensors.head_norm_shapes(config)
    )


def linear_attention_shapes(config: CheckpointConfig) -> Shapes:
    """Return the shapes of one block's linear attention, by role, without the projections that
    set the decay (alpha) and the strength (beta) of updates.
    """
    hidden, (key_heads, value_heads, width) = config.get_int("hidden_size"), head_counts(config)
    value_width = value_heads * width
    channels = 2 * key_heads * width + value_width
    return {
        "attn_qkv.weight": (channels, hidden),
        "attn_gate.weight": (value_width, hidden),
        "ssm_conv1d.weight": (channels, config.get_int("linear_conv_kernel_dim")),
        "ssm_dt.bias": (value_heads,),
        "ssm_a": (value_heads,),
        "ssm_norm.weight": (width,),
        "ssm_out.weight": (hidden, value_width),
    }


def hybrid_shapes(config: CheckpointConfig, linear: Shapes, feed_forward: Shapes) -> Shapes:
    """Return the shapes of all tensors that a converted model must have, rows first, by GGUF name.
    `linear` are those of one block's linear attention, `feed_forward` those of one block's
    feed-forward.
    """
    is_linear, full = linear_layers(config), gated_attention_shapes(config)
    common = norm_shapes(config) | feed_forward
    return block_tensors.embedding_and_head(config) | block_tensors.shapes_by_block(
        layout.layer_count(config),
        lambda layer: (linear if is_linear[layer] else full) | common,
    )


def required_shapes(config: CheckpointConfig) -> Shapes:
    """Return the shapes of all tensors that a converted model must have, rows first, by
    GGUF name.
    """
    hidden, value_heads = config.get_int("hidden_size"), head_counts(config)[1]
    linear = linear_attention_shapes(config) | {"ssm_ba.weight": (2 * value_heads, hidden)}
    return hybrid_shapes(config, linear, gated_expert_shapes(config))


def prediction_shapes(config: CheckpointConfig) -> Shapes:
    """Return the shapes of the tensors of one layer that predicts further tokens, by role. Its
    block has attention with a gate.
    """
    return hybrid_prediction_shapes(config, gated_expert_shapes(config))


def hybrid_prediction_shapes(config: CheckpointConfig, feed_forward: Shapes) -> Shapes:
    """Return prediction_shapes() of a model whose blocks have this feed-forward."""
    return (
        prediction.input_shapes(config)
        | norm_shapes(config)
        | gated_attention_shapes(config)
        | feed_forward
    )


def rename_linear(config: CheckpointConfig, tensors: Tensors) -> Tensors:
    """Return the tensors of linear attention with names that gguf_tables.py knows, and the
    convolution `[channels, 1, width]` as a matrix.
    """
    squeezed = {
        name: state_space.squeeze_kernel(tensor)
        if name.endswith(".linear_attn.conv1d.weight")
        else tensor
        for name, tensor in tensors.items()
    }
    return block_tensors.rename_tensors(
        squeezed, lambda name: name.replace(".linear_attn.dt_bias", ".linear_attn.dt_proj.bias")
    )


def prepare(config: CheckpointConfig, tensors: Tensors) -> Tensors:
    """Return the tensors with experts stacked, and with queries, keys, values and gates of linear
    attention split.
    """
    result: Tensors = {}
    for name, tensor in rename_linear(config, experts.stack_experts(config, tensors)).items():
        if name.endswith(".in_proj_qkvz.weight"):
            result |= _split_by_heads(config, name, tensor)
        else:
            result[name] = tensor
    return result


def _split_by_heads(config: CheckpointConfig, name: str, tensor: LazyTensor) -> Tensors:
    """Split in_proj_qkvz, whose rows are query, key, values and gates of each key head, into
    queries, keys and values one after the other, and gates.

    A matrix of any other shape is not split. It is renamed to a name that contains its shape, so
    that the error about unknown tensors shows the shape.
    """
    key_heads, value_heads, width = head_counts(config)
    values = value_heads // key_heads * width
    height = 2 * width + 2 * values
    if tensor.shape != (key_heads * height, config.get_int("hidden_size")):
        label = f"{tensor.name} {list(tensor.shape)}"
        return {label: replace(tensor, name=label)}

    def rows_of(start: int, count: int) -> list[int]:
        return [
            head * height + row for head in range(key_heads) for row in range(start, start + count)
        ]

    order = rows_of(0, width) + rows_of(width, width) + rows_of(2 * width, values)
    return {
        name.replace("in_proj_qkvz", "in_proj_qkv"): tensor_views.pick_rows(tensor, order),
        name.replace("in_proj_qkvz", "in_proj_z"): tensor_views.pick_rows(
            tensor, rows_of(2 * width + values, values)
        ),
    }


def _add_one(config: CheckpointConfig, tensor: LazyTensor) -> LazyTensor:
    return tensor_views.add_one(tensor)


TENSOR_OPS: dict[str, TensorOp] = {
    "ssm_a": lambda config, tensor: state_space.negate_exp(tensor),
    **dict.fromkeys(
        (
            "attn_norm",
            "post_attention_norm",
            "attn_q_norm",
            "attn_k_norm",
            "output_norm",
            "nextn.enorm",
            "nextn.hnorm",
            "nextn.shared_head_norm",
        ),
        _add_one,
    ),
}

QWEN3NEXT = Arch(
    name="qwen3next",
    kind="QWEN3NEXT",
    hf=("Qwen3NextForCausalLM",),
    keys=keys,
    required_shapes=required_shapes,
    check=check,
    prepare=prepare,
    prediction_shapes=prediction_shapes,
    ops=TENSOR_OPS,
    defaults={
        **LINEAR_DEFAULTS,
        "num_experts_per_tok": 10,
        "num_experts": 512,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "norm_topk_prob": True,
    },
)

ARCHS = (QWEN3NEXT,)
