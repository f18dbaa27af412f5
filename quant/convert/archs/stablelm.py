"""StableLM: rotary halves in a part of each head, and norms that subtract the mean. In the 12B
model, attention and feed-forward have the same input, and each head has its own norm.

Follows StableLMModel of llama.cpp (conversion/stablelm.py, src/models/stablelm.cpp). The converter
of llama.cpp writes no rotary base, which is then 10000.
"""

import re
from collections import defaultdict

from quant.checkpoint import tensor_views
from quant.checkpoint.config import CheckpointConfig
from quant.checkpoint.safetensors import Tensors
from quant.convert.parts import block_tensors, checks, metadata, rope
from quant.convert.parts.base import Arch, ArchKey, Shapes

DEFAULTS = {  # defaults of transformers' StableLmConfig
    "num_key_value_heads": 32,
    "layer_norm_eps": 1e-5,
    "partial_rotary_factor": 0.25,
}
HEAD_NORM_NAME = re.compile(r"(.+\.[qk]_layernorm)\.norms\.(\d{1,4})\.weight", re.DOTALL)


def check(config: CheckpointConfig) -> list[str]:
    """Raise UserError for settings that llama.cpp's stablelm computes differently. Return
    no notes.
    """
    checks.raise_problems(
        config,
        [
            *checks.common_problems(config, allow_partial_rotary=True),
            checks.problem_head_width(config),
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
    block = block_tensors.attention_shapes(config) | block_tensors.feed_forward_shapes(config)
    block |= block_tensors.norm_bias_shapes(config, "attn_norm", "ffn_norm")
    if config.get_bool("use_parallel_residual"):
        del block["ffn_norm.weight"], block["ffn_norm.bias"]
    if config.get_bool("use_qkv_bias"):
        block |= block_tensors.qkv_bias_shapes(config)
    if config.get_bool("qk_layernorm"):
        block |= block_tensors.separate_head_norm_shapes(config)
    return (
        block_tensors.embedding_and_head(config)
        | block_tensors.norm_bias_shapes(config, "output_norm")
        | block_tensors.repeat_for_blocks(config, block)
    )


def prepare(config: CheckpointConfig, tensors: Tensors) -> Tensors:
    """Return the tensors with the norms of all heads of a block stacked. A stack of another number
    of norms has another shape than expected.
    """
    result: Tensors = {}
    norms: dict[str, Tensors] = defaultdict(dict)
    for name, tensor in tensors.items():
        if match := HEAD_NORM_NAME.fullmatch(name):
            norms[match[1]][match[2].zfill(4)] = tensor
        else:
            result[name] = tensor
    for name, heads in norms.items():
        parts = [heads[number] for number in sorted(heads)]
        same = len({(part.shape, part.dtype) for part in parts}) == 1
        if same and len(parts[0].shape) == 1:
            result[f"{name}.weight"] = tensor_views.stack(f"{name}.weight", parts)
        else:
            result |= {part.name: part for part in parts}
    return result


STABLELM = Arch(
    name="stablelm",
    kind="STABLELM",
    hf=("StableLmForCausalLM",),
    keys=keys,
    required_shapes=required_shapes,
    check=check,
    defaults=DEFAULTS,
    prepare=prepare,
    needs_head=True,
)

ARCHS = (STABLELM,)
