"""Phi 1 to 2: rotary halves in a part of each head, norms that subtract the mean, one input for
attention and feed-forward, biases in all matrices, also in the head.

Follows Phi2Model of llama.cpp (conversion/phi.py, src/models/phi2.cpp). The converter of llama.cpp
writes no rotary base, which is then 10000, and a feed-forward of four times the hidden size.
"""

from quant.checkpoint.config import CheckpointConfig
from quant.convert.parts import block_tensors, checks, metadata, rope
from quant.convert.parts.base import Arch, ArchKey, Shapes

DEFAULTS = {"layer_norm_eps": 1e-5, "partial_rotary_factor": 0.5}  # of transformers' PhiConfig


def check(config: CheckpointConfig) -> list[str]:
    """Raise UserError for settings that llama.cpp's phi2 computes differently. Return no notes."""
    checks.raise_problems(
        config,
        [
            *checks.common_problems(
                config,
                activations=("gelu_new", "gelu_pytorch_tanh"),
                allow_partial_rotary=True,
            ),
            checks.problem_head_width(config),
            (config.get_bool("qk_layernorm"), "it has norms of heads (qk_layernorm)"),
        ],
    )
    return []


def keys(config: CheckpointConfig) -> list[ArchKey]:
    """Return the common metadata keys and the rotary width of a head."""
    return [
        *metadata.layer_norm_keys(config, config.get_float("layer_norm_eps")),
        ArchKey("rope.dimension_count", "uint32", rope.rotary_width(config)),
    ]


def required_shapes(config: CheckpointConfig) -> Shapes:
    """Return the shapes of all tensors that a converted model must have, rows first, by
    GGUF name.
    """
    block = (
        block_tensors.attention_shapes(config)
        | block_tensors.qkv_bias_shapes(config)
        | block_tensors.plain_feed_forward_shapes(config)
        | block_tensors.norm_bias_shapes(config, "attn_norm")
        | block_tensors.output_bias_shapes(config)
    )
    del block["ffn_norm.weight"]
    return (
        block_tensors.embedding_and_head(config)
        | block_tensors.norm_bias_shapes(config, "output_norm")
        | {"output.bias": (config.get_int("vocab_size"),)}
        | block_tensors.repeat_for_blocks(config, block)
    )


PHI2 = Arch(
    name="phi2",
    kind="PHI2",
    hf=("PhiForCausalLM",),
    keys=keys,
    required_shapes=required_shapes,
    check=check,
    defaults=DEFAULTS,
    needs_head=True,
)

ARCHS = (PHI2,)
