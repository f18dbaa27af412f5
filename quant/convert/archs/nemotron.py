"""Nemotron and Minitron: rotary halves in a part of each head, norms that subtract the mean, and a
feed-forward of two matrices with a squared ReLU. Checkpoints store the weights of norms minus one.

Follows NemotronModel of llama.cpp (conversion/nemotron.py, src/models/nemotron.cpp).
"""

from quant.checkpoint import tensor_views
from quant.checkpoint.config import CheckpointConfig
from quant.checkpoint.safetensors import LazyTensor
from quant.convert.parts import block_tensors, checks, metadata, rope
from quant.convert.parts.base import Arch, ArchKey, Shapes

DEFAULTS = {"norm_eps": 1e-5, "partial_rotary_factor": 0.5}  # of transformers' NemotronConfig


def check(config: CheckpointConfig) -> list[str]:
    """Raise UserError for settings that llama.cpp's nemotron computes differently. Return
    no notes.
    """
    checks.raise_problems(
        config,
        [
            *checks.common_problems(config, activations=("relu2",), allow_partial_rotary=True),
            checks.problem_head_width(config),
        ],
    )
    return []


def keys(config: CheckpointConfig) -> list[ArchKey]:
    """Return the common metadata keys and the rotary width of a head."""
    return [
        *metadata.layer_norm_keys(config, config.get_float("norm_eps")),
        ArchKey("rope.dimension_count", "uint32", rope.rotary_width(config)),
    ]


def required_shapes(config: CheckpointConfig) -> Shapes:
    """Return the shapes of all tensors that a converted model must have, rows first, by
    GGUF name.
    """
    hidden, ff = config.get_int("hidden_size"), config.get_int("intermediate_size")
    biases = block_tensors.norm_bias_shapes(config, "attn_norm", "ffn_norm")
    if config.get_bool("attention_bias"):
        biases |= block_tensors.qkv_bias_shapes(config) | {"attn_output.bias": (hidden,)}
    if config.get_bool("mlp_bias"):
        biases |= {"ffn_up.bias": (ff,), "ffn_down.bias": (hidden,)}
    return (
        block_tensors.embedding_and_head(config)
        | block_tensors.norm_bias_shapes(config, "output_norm")
        | block_tensors.repeat_for_blocks(
            config,
            block_tensors.attention_shapes(config),
            block_tensors.plain_feed_forward_shapes(config),
            biases,
        )
    )


def _shift_norm(config: CheckpointConfig, tensor: LazyTensor) -> LazyTensor:
    """Add one to the weights of a norm. Its biases stay unchanged."""
    return tensor if tensor.name.endswith(".bias") else tensor_views.add_one(tensor)


NEMOTRON = Arch(
    name="nemotron",
    kind="NEMOTRON",
    hf=("NemotronForCausalLM",),
    keys=keys,
    required_shapes=required_shapes,
    check=check,
    defaults=DEFAULTS,
    ops=dict.fromkeys(("attn_norm", "ffn_norm", "output_norm"), _shift_norm),
    needs_head=True,
)

ARCHS = (NEMOTRON,)
