"""Falcon H1: every layer adds the outputs of attention and of a state-space layer of Mamba 2, then
a gated feed-forward. Multipliers scale what goes into these parts and what comes out of them.

Follows FalconH1Model of llama.cpp (conversion/falcon_h1.py, src/models/falcon-h1.cpp). Its graph
has no multipliers, so they become part of the weights; the last bits of products of several
multipliers differ. A head that is tied to the embedding becomes a tensor of its own, unless both
have the same multiplier, as transformers needs it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from quant.checkpoint import tensor_views
from quant.checkpoint.config import CheckpointConfig
from quant.checkpoint.safetensors import LazyTensor, Tensors
from quant.convert.parts import block_tensors, checks, layout, metadata, state_space
from quant.convert.parts.base import Arch, ArchKey, Shapes, TensorOp
from quant.convert.parts.state_space import Mamba2Widths
from quant.errors import UserError

if TYPE_CHECKING:
    from quant.native.ggml import F32, U8

DEFAULTS: Mapping[str, Any] = {
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "mamba_d_ssm": 1024,
    "mamba_n_heads": 128,
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_conv_bias": True,
    "mamba_norm_before_gate": True,
    "mamba_rms_norm": False,
    "lm_head_multiplier": 1.0,
    "embedding_multiplier": 1.0,
    "key_multiplier": 1.0,
    "attention_in_multiplier": 1.0,
    "attention_out_multiplier": 1.0,
    "ssm_in_multiplier": 1.0,
    "ssm_out_multiplier": 1.0,
}


def widths(config: CheckpointConfig) -> Mamba2Widths:
    """Return the widths of the state-space layers that config.json describes."""
    if config.values.get("mamba_d_ssm") is None:
        inner = config.get_int("mamba_expand") * config.get_int("hidden_size")
    else:
        inner = config.get_int("mamba_d_ssm")
    return Mamba2Widths(
        inner=inner,
        state=config.get_int("mamba_d_state"),
        groups=config.get_int("mamba_n_groups"),
        heads=config.get_int("mamba_n_heads"),
        kernel=config.get_int("mamba_d_conv"),
    )


def multipliers(config: CheckpointConfig, key: str, count: int) -> list[float]:
    """Return the `count` multipliers under `key`; ones if there are none. Raises UserError if they
    are not `count` positive numbers.
    """
    values = config.values.get(key)
    if values is None:
        return [1.0] * count
    if not isinstance(values, list) or len(values) != count:
        raise UserError(
            f"{config.location}: {key} should be {count} numbers", hint="fetch it again"
        )
    return [CheckpointConfig({key: value}, config.location).get_float(key) for value in values]


def check(config: CheckpointConfig) -> list[str]:
    """Raise UserError for settings that llama.cpp's falcon-h1 computes differently. Return no
    notes.
    """
    checks.raise_problems(
        config,
        [
            *checks.common_problems(config),
            *state_space.width_problems(widths(config)),
            state_space.problem_step_limit(config),
            checks.problem_biases(config, "attention_bias", "mlp_bias", "mamba_proj_bias"),
            (
                has_norm(config) and config.get_bool("mamba_norm_before_gate"),
                "the norm of its state-space layers comes before the gate",
            ),
        ],
    )
    return []


def has_norm(config: CheckpointConfig) -> bool:
    """Return whether the state-space layers have a norm."""
    return config.get_bool("mamba_rms_norm")


def keys(config: CheckpointConfig) -> list[ArchKey]:
    """Return the common metadata keys, then those of the state-space layers."""
    return [
        *metadata.common_keys(_with_head_width(config)),
        *state_space.state_keys(widths(config)),
    ]


def _with_head_width(config: CheckpointConfig) -> CheckpointConfig:
    """Return the config with the width of a head, which is then written as metadata."""
    head_dim = layout.head_counts(config)[2]
    return replace(config, values={**config.values, "head_dim": head_dim})


def required_shapes(config: CheckpointConfig) -> Shapes:
    """Return the shapes of all tensors that a converted model must have, rows first, by
    GGUF name.
    """
    hidden, ff = config.get_int("hidden_size"), config.get_int("intermediate_size")
    states = state_space.state_shapes(widths(config), hidden, has_conv_bias(config))
    if not has_norm(config):
        del states["ssm_norm.weight"]
    feed_forward: Shapes = {
        "ffn_norm": (hidden,),
        "ffn_gate.weight": (ff, hidden),
        "ffn_up.weight": (ff, hidden),
        "ffn_down.weight": (hidden, ff),
    }
    return block_tensors.embedding_and_head(config) | block_tensors.repeat_for_blocks(
        config, block_tensors.attention_shapes(config), states, feed_forward
    )


def has_conv_bias(config: CheckpointConfig) -> bool:
    """Return whether the convolutions have biases."""
    return config.get_bool("mamba_conv_bias", default=True)


def extra_tensors(config: CheckpointConfig) -> "dict[str, F32]":
    """Return biases of zero for convolutions without them."""
    if has_conv_bias(config):
        return {}
    return state_space.zero_biases(widths(config), range(layout.layer_count(config)))


def prepare(config: CheckpointConfig, tensors: Tensors) -> Tensors:
    """Return the tensors with those of the state-space layers as llama.cpp stores them."""
    return state_space.prepare_mixers(config.get_int("mamba_n_groups"), tensors)


def _scale(tensor: LazyTensor, *factors: float) -> LazyTensor:
    """Return the tensor with all values multiplied by the product of the factors."""
    product = 1.0
    for factor in factors:
        product *= factor
    if product == 1:
        return tensor
    return tensor_views.map_values(tensor, lambda values: values * product)


def _scale_by_setting(*settings: str) -> TensorOp:
    """Return a function that multiplies a tensor by the settings with these names."""
    return lambda config, tensor: _scale(
        tensor, *(config.get_float(setting) for setting in settings)
    )


def _scale_input(config: CheckpointConfig, tensor: LazyTensor) -> LazyTensor:
    """Multiply the rows of the input projection, which are z, x, B, C and the time steps, by their
    multipliers.
    """
    sizes = widths(config)
    heights = (
        sizes.inner,
        sizes.inner,
        sizes.groups * sizes.state,
        sizes.groups * sizes.state,
        sizes.heads,
    )
    scale = config.get_float("ssm_in_multiplier")
    factors = [factor * scale for factor in multipliers(config, "ssm_multipliers", len(heights))]
    return _scale_rows(tensor, heights, factors)


def _scale_rows(tensor: LazyTensor, heights: Sequence[int], factors: Sequence[float]) -> LazyTensor:
    """Return an F32 tensor whose first heights[0] rows are multiplied by factors[0], the next
    heights[1] by factors[1], and so on.
    """
    if all(factor == 1 for factor in factors):
        return tensor

    def read(first: int, last: int) -> "U8":
        import numpy as np

        column = np.repeat(np.array(factors, np.float32), heights)[first:last, None]
        scaled: F32 = tensor_views.read_floats(tensor, first, last) * column
        return scaled.view(np.uint8)

    return replace(tensor, dtype="F32", read=read)


OPS: Mapping[str, TensorOp] = {
    "token_embd": _scale_by_setting("embedding_multiplier"),
    "output": _scale_by_setting("lm_head_multiplier"),
    "attn_q": _scale_by_setting("attention_in_multiplier"),
    "attn_k": _scale_by_setting("attention_in_multiplier", "key_multiplier"),
    "attn_v": _scale_by_setting("attention_in_multiplier"),
    "attn_output": _scale_by_setting("attention_out_multiplier"),
    "ssm_in": _scale_input,
    "ssm_out": _scale_by_setting("ssm_out_multiplier"),
    "ffn_gate": lambda config, tensor: _scale(tensor, multipliers(config, "mlp_multipliers", 2)[0]),
    "ffn_down": lambda config, tensor: _scale(tensor, multipliers(config, "mlp_multipliers", 2)[1]),
}


def select(config: CheckpointConfig) -> Arch:
    """Return the family, which writes a tied head if its multiplier differs from the
    embedding's.
    """
    differs = config.get_float("embedding_multiplier") != config.get_float("lm_head_multiplier")
    return replace(FALCON_H1, needs_head=config.get_bool("tie_word_embeddings") and differs)


FALCON_H1 = Arch(
    name="falcon-h1",
    kind="FALCON_H1",
    hf=("FalconH1ForCausalLM",),
    keys=keys,
    required_shapes=required_shapes,
    check=check,
    defaults=DEFAULTS,
    prepare=prepare,
    ops=OPS,
    extra_tensors=extra_tensors,
    select=select,
)

ARCHS = (FALCON_H1,)
