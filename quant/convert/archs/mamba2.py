"""Mamba 2: state-space layers only, without attention and feed-forward.

Follows Mamba2Model of llama.cpp (conversion/mamba.py, src/models/mamba2.cpp), with its context
length, because such a model has no limit of its own.
"""

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from quant.checkpoint.config import CheckpointConfig
from quant.checkpoint.safetensors import Tensors
from quant.convert.parts import block_tensors, checks, layout, state_space
from quant.convert.parts.base import Arch, ArchKey, Shapes
from quant.convert.parts.state_space import Mamba2Widths

if TYPE_CHECKING:
    from quant.native.ggml import F32

CONTEXT_LENGTH = 1 << 20
DEFAULTS: Mapping[str, Any] = {
    "num_heads": 128,
    "head_dim": 64,
    "state_size": 128,
    "n_groups": 8,
    "conv_kernel": 4,
    "expand": 2,
    "use_conv_bias": True,
    "hidden_act": "silu",
    "layer_norm_epsilon": 1e-5,
}


def widths(config: CheckpointConfig) -> Mamba2Widths:
    """Return the widths of the state-space layers that config.json describes."""
    return Mamba2Widths(
        inner=config.get_int("expand") * config.get_int("hidden_size"),
        state=config.get_int("state_size"),
        groups=config.get_int("n_groups"),
        heads=config.get_int("num_heads"),
        kernel=config.get_int("conv_kernel"),
    )


def check(config: CheckpointConfig) -> list[str]:
    """Raise UserError for settings that llama.cpp's mamba2 computes differently. Return no
    notes.
    """
    sizes, head_dim = widths(config), config.get_int("head_dim")
    activation = config.values.get("hidden_act")
    checks.raise_problems(
        config,
        [
            (activation != "silu", f"its activation is {activation}"),
            (
                head_dim * sizes.heads != sizes.inner,
                f"its {sizes.heads} heads of {head_dim} values do not make {sizes.inner}",
            ),
            *state_space.width_problems(sizes),
            state_space.problem_step_limit(config),
            checks.problem_biases(config, "use_bias"),
        ],
    )
    return []


def keys(config: CheckpointConfig) -> list[ArchKey]:
    """Return the metadata keys. llama.cpp needs those of attention and feed-forward, too."""
    return [
        ArchKey("context_length", "uint32", CONTEXT_LENGTH),
        ArchKey("embedding_length", "uint32", config.get_int("hidden_size")),
        ArchKey("feed_forward_length", "uint32", 0),
        ArchKey("attention.head_count", "uint32", 0),
        ArchKey("block_count", "uint32", layout.layer_count(config)),
        *state_space.state_keys(widths(config)),
        ArchKey(
            "attention.layer_norm_rms_epsilon", "float32", config.get_float("layer_norm_epsilon")
        ),
    ]


def required_shapes(config: CheckpointConfig) -> Shapes:
    """Return the shapes of all tensors that a converted model must have, rows first, by
    GGUF name.
    """
    hidden = config.get_int("hidden_size")
    norm: Shapes = {"attn_norm.weight": (hidden,)}
    return block_tensors.embedding_and_head(config) | block_tensors.repeat_for_blocks(
        config, norm, state_space.state_shapes(widths(config), hidden, has_conv_bias(config))
    )


def has_conv_bias(config: CheckpointConfig) -> bool:
    """Return whether the convolutions have biases."""
    return config.get_bool("use_conv_bias", default=True)


def extra_tensors(config: CheckpointConfig) -> "dict[str, F32]":
    """Return biases of zero for convolutions without them."""
    if has_conv_bias(config):
        return {}
    return state_space.zero_biases(widths(config), range(layout.layer_count(config)))


def prepare(config: CheckpointConfig, tensors: Tensors) -> Tensors:
    """Return the tensors with those of the state-space layers as llama.cpp stores them, under the
    names of transformers. Codestral's begin with "model.".
    """
    prepared = state_space.prepare_mixers(config.get_int("n_groups"), tensors)
    return block_tensors.rename_tensors(
        prepared, lambda name: re.sub(r"^model\.(?=backbone\.|lm_head\.)", "", name)
    )


MAMBA2 = Arch(
    name="mamba2",
    kind="MAMBA2",
    hf=("Mamba2ForCausalLM",),
    keys=keys,
    required_shapes=required_shapes,
    check=check,
    defaults=DEFAULTS,
    prepare=prepare,
    extra_tensors=extra_tensors,
)

ARCHS = (MAMBA2,)
