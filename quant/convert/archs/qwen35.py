"""Qwen3.5 and 3.6, the dense models: layers with linear attention and layers with gated attention,
and rotary positions in sections (mrope), of which text needs only one. The vision part is left out.

Follows Qwen3_5TextModel of llama.cpp (conversion/qwen.py, src/models/qwen35.cpp). The weights of
norms are stored minus one as in Qwen3-Next. llama.cpp expects the value heads of linear attention
in another order: the first head of each key head, then the second one of each, and so on.
"""

from dataclasses import replace

from quant.checkpoint import tensor_views
from quant.checkpoint.config import CheckpointConfig
from quant.checkpoint.safetensors import LazyTensor
from quant.convert.archs import qwen3_next
from quant.convert.archs.qwen3_vl import section_keys, section_notes, section_problems
from quant.convert.parts import block_tensors, checks
from quant.convert.parts.base import ArchKey, Shapes, TensorOp

SECTIONS = [11, 11, 10]


def check(config: CheckpointConfig) -> list[str]:
    """Raise UserError for settings that llama.cpp's qwen35 computes differently; return notes for
    the user.
    """
    checks.raise_problems(config, problems(config))
    return notes(config)


def problems(config: CheckpointConfig) -> list[tuple[object, str]]:
    """Return the problems (see checks.py) that are the same for models with and without experts."""
    return [
        *section_problems(config, SECTIONS, allow_partial_rotary=True),
        *qwen3_next.linear_problems(config),
    ]


def notes(config: CheckpointConfig) -> list[str]:
    """Return notes about what llama.cpp computes slightly differently."""
    return [*section_notes(config, SECTIONS), *qwen3_next.linear_notes(config)]


def hybrid_keys(config: CheckpointConfig) -> list[ArchKey]:
    """Return the metadata keys that are the same for models with and without experts."""
    return [
        *qwen3_next.common_keys(config),
        *section_keys(config, SECTIONS),
        *qwen3_next.linear_keys(config),
    ]


def linear_attention_shapes(config: CheckpointConfig) -> Shapes:
    """Return the shapes of one block's linear attention, by role."""
    hidden, value_heads = config.get_int("hidden_size"), qwen3_next.head_counts(config)[1]
    return qwen3_next.linear_attention_shapes(config) | {
        "ssm_alpha.weight": (value_heads, hidden),
        "ssm_beta.weight": (value_heads, hidden),
    }


def feed_forward_shapes(config: CheckpointConfig) -> Shapes:
    """Return the shapes of one block's feed-forward, by role. The norm before it is not among
    them: it is called post_attention_norm.
    """
    shapes = block_tensors.feed_forward_shapes(config)
    del shapes["ffn_norm.weight"]
    return shapes


def required_shapes(config: CheckpointConfig) -> Shapes:
    """Return the shapes of all tensors that a converted model must have, rows first, by
    GGUF name.
    """
    return qwen3_next.hybrid_shapes(
        config, linear_attention_shapes(config), feed_forward_shapes(config)
    )


def prediction_shapes(config: CheckpointConfig) -> Shapes:
    """Return the shapes of the tensors of one layer that predicts further tokens, by role."""
    return qwen3_next.hybrid_prediction_shapes(config, feed_forward_shapes(config))


def value_head_order(config: CheckpointConfig) -> list[int]:
    """Return the order of value heads in llama.cpp: entry i is the checkpoint's number of head i.

    A checkpoint stores the heads of the first key head first. In llama.cpp, value head i belongs to
    key head i modulo the number of key heads.
    """
    key_heads, value_heads, _ = qwen3_next.head_counts(config)
    per_key = value_heads // key_heads
    return [key * per_key + index for index in range(per_key) for key in range(key_heads)]


def _reorder_rows(
    config: CheckpointConfig, tensor: LazyTensor, width: int, first: int = 0
) -> LazyTensor:
    """Return the tensor with its value heads, of `width` rows each, in llama.cpp's order. They
    begin at row `first`.
    """
    order = value_head_order(config)
    if order == sorted(order):
        return tensor
    rows = [first + head * width + row for head in order for row in range(width)]
    return tensor_views.pick_rows(tensor, [*range(first), *rows])


def _reorder_vector(config: CheckpointConfig, tensor: LazyTensor) -> LazyTensor:
    return _reorder_rows(config, tensor, 1)


def _reorder_values(config: CheckpointConfig, tensor: LazyTensor) -> LazyTensor:
    return _reorder_rows(config, tensor, qwen3_next.head_counts(config)[2])


def _reorder_channels(config: CheckpointConfig, tensor: LazyTensor) -> LazyTensor:
    """Reorder the values, which follow the queries and the keys."""
    key_heads, _, width = qwen3_next.head_counts(config)
    return _reorder_rows(config, tensor, width, first=2 * key_heads * width)


def _reorder_columns(config: CheckpointConfig, tensor: LazyTensor) -> LazyTensor:
    order = value_head_order(config)
    if order == sorted(order):
        return tensor
    return tensor_views.pick_column_groups(tensor, qwen3_next.head_counts(config)[2], order)


def _reorder_decay(config: CheckpointConfig, tensor: LazyTensor) -> LazyTensor:
    return _reorder_vector(config, qwen3_next.TENSOR_OPS["ssm_a"](config, tensor))


TENSOR_OPS: dict[str, TensorOp] = {
    **qwen3_next.TENSOR_OPS,
    "attn_qkv": _reorder_channels,
    "attn_gate": _reorder_values,
    "ssm_conv1d": _reorder_channels,
    "ssm_alpha": _reorder_vector,
    "ssm_beta": _reorder_vector,
    "ssm_dt": _reorder_vector,
    "ssm_a": _reorder_decay,
    "ssm_out": _reorder_columns,
}

QWEN35 = replace(
    qwen3_next.QWEN3NEXT,
    name="qwen35",
    kind="QWEN35",
    hf=("Qwen3_5ForConditionalGeneration", "Qwen3_5ForCausalLM"),
    keys=hybrid_keys,
    required_shapes=required_shapes,
    check=check,
    prepare=qwen3_next.rename_linear,
    prediction_shapes=prediction_shapes,
    ops=TENSOR_OPS,
    defaults=qwen3_next.LINEAR_DEFAULTS,
)

ARCHS = (QWEN35,)
