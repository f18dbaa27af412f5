"""GPT-NeoX and Pythia: queries, keys and values of each head in one matrix, rotary halves in a part
of each head, norms that subtract the mean, and usually one input for attention and feed-forward.

Follows GPTNeoXModel of llama.cpp (conversion/gptneox.py, src/models/gptneox.cpp). llama.cpp
approximates the GELU by a hyperbolic tangent, so that logits differ slightly. Its converter writes
no rotary base, which is then 10000.
"""

from dataclasses import replace

from quant.checkpoint import tensor_views
from quant.checkpoint.config import CheckpointConfig
from quant.checkpoint.safetensors import LazyTensor
from quant.convert.parts import block_tensors, checks, layout, metadata, rope
from quant.convert.parts.base import Arch, ArchKey, Shapes

DEFAULTS = {  # defaults of transformers' GPTNeoXConfig
    "layer_norm_eps": 1e-5,
    "partial_rotary_factor": 0.25,
    "use_parallel_residual": True,
    "attention_bias": True,
}
ROPE_NAMES = {"rotary_emb_base": "rope_theta", "rotary_pct": "partial_rotary_factor"}


def normalize(config: CheckpointConfig) -> CheckpointConfig:
    """Return the config with the rotary settings under the names that other families use."""
    values = dict(config.values)
    for name, usual in ROPE_NAMES.items():
        if values.get(name) is not None:
            values[usual] = values[name]
    return replace(config, values=values)


def check(config: CheckpointConfig) -> list[str]:
    """Raise UserError for settings that llama.cpp's gptneox computes differently. Return
    no notes.
    """
    checks.raise_problems(
        config,
        [
            *checks.common_problems(
                config,
                activations=("gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh"),
                allow_partial_rotary=True,
            ),
            checks.problem_head_width(config),
            checks.problem_shared_keys(config),
            (not config.get_bool("attention_bias"), "its attention has no biases"),
        ],
    )
    return []


def keys(config: CheckpointConfig) -> list[ArchKey]:
    """Return the common metadata keys, the rotary width of a head, and whether attention and
    feed-forward have the same input.
    """
    return [
        *metadata.layer_norm_keys(config, config.get_float("layer_norm_eps")),
        ArchKey("rope.dimension_count", "uint32", rope.rotary_width(config)),
        ArchKey("use_parallel_residual", "bool", config.get_bool("use_parallel_residual")),
    ]


def required_shapes(config: CheckpointConfig) -> Shapes:
    """Return the shapes of all tensors that a converted model must have, rows first, by
    GGUF name.
    """
    hidden = config.get_int("hidden_size")
    block = (
        block_tensors.fused_attention_shapes(config)
        | block_tensors.plain_feed_forward_shapes(config)
        | {"attn_qkv.bias": (3 * hidden,)}
        | block_tensors.output_bias_shapes(config)
        | block_tensors.norm_bias_shapes(config, "attn_norm", "ffn_norm")
    )
    return (
        block_tensors.embedding_and_head(config)
        | block_tensors.norm_bias_shapes(config, "output_norm")
        | block_tensors.repeat_for_blocks(config, block)
    )


def _group_rows(config: CheckpointConfig, tensor: LazyTensor) -> LazyTensor:
    """Reorder rows from [head, query or key or value, width] to all queries, then all keys, then
    all values.
    """
    count, _, width = layout.head_counts(config)
    return tensor_views.pick_rows(
        tensor,
        [
            (head * 3 + part) * width + row
            for part in range(3)
            for head in range(count)
            for row in range(width)
        ],
    )


GPTNEOX = Arch(
    name="gptneox",
    kind="GPTNEOX",
    hf=("GPTNeoXForCausalLM",),
    keys=keys,
    required_shapes=required_shapes,
    check=check,
    defaults=DEFAULTS,
    normalize=normalize,
    ops={"attn_qkv": _group_rows},
    needs_head=True,
)

ARCHS = (GPTNEOX,)
