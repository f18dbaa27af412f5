"""Phi 3, 3.5 and 4: queries, keys and values in one matrix, gate and up in another, and rotary
factors for long contexts (LongRoPE).

Follows conversion/phi.py and src/models/phi3.cpp of llama.cpp. llama.cpp ignores the sliding
window. Whenever its context is larger than the original length, it uses the factors for long
contexts.
"""

import math
from typing import TYPE_CHECKING

from quant.checkpoint.config import CheckpointConfig
from quant.convert.parts import block_tensors, checks, layout, metadata, rope
from quant.convert.parts.base import Arch, ArchKey, Shapes
from quant.errors import UserError

if TYPE_CHECKING:
    from quant.native.ggml import F32

DEFAULTS = {
    "max_position_embeddings": 4096,
    "original_max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
}
LONGROPE_TYPES = ("longrope", "su")


def longrope_settings(config: CheckpointConfig) -> CheckpointConfig | None:
    """Return the rotary settings if the model uses LongRoPE, else None."""
    settings = rope.rope_settings(config)
    return settings if settings.values["rope_type"] in LONGROPE_TYPES else None


def check(config: CheckpointConfig) -> list[str]:
    """Raise UserError for settings that llama.cpp's phi3 computes differently; return notes for the
    user.
    """
    count, _, head_dim = layout.head_counts(config)
    hidden = config.get_int("hidden_size")
    original = config.get_int("original_max_position_embeddings")
    checks.raise_problems(
        config,
        [
            *checks.common_problems(
                config, rope_types=("default", *LONGROPE_TYPES), allow_partial_rotary=True
            ),
            (
                count * head_dim != hidden,
                f"its {count} heads of {head_dim} values do not make {hidden} values",
            ),
            checks.problem_biases(config, "attention_bias"),
        ],
    )
    notes = checks.window_notes(config, "phi3")
    if longrope_settings(config):
        notes.append(
            f"this model uses other rotary factors in texts beyond {original} tokens, llama.cpp "
            f"whenever its context is larger than that: use -c {original} for short texts"
        )
    return notes


def keys(config: CheckpointConfig) -> list[ArchKey]:
    """Return the common metadata keys, the rotary width of a head, the sliding window, and
    LongRoPE's keys.

    A window of 0 means that the model has no window. llama.cpp recognizes Phi 4 by this value.
    """
    window = config.values.get("sliding_window")
    return [
        *metadata.common_keys(config),
        ArchKey("rope.dimension_count", "uint32", rope.rotary_width(config)),
        ArchKey(
            "attention.sliding_window",
            "uint32",
            0 if window is None else config.get_int("sliding_window"),
        ),
        *longrope_keys(config),
    ]


def longrope_keys(config: CheckpointConfig) -> list[ArchKey]:
    """Return the metadata keys of the original context length, and of LongRoPE's type and attention
    factor.
    """
    original = config.get_int("original_max_position_embeddings")
    keys = [ArchKey("rope.scaling.original_context_length", "uint32", original)]
    if settings := longrope_settings(config):
        ratio = config.get_int("max_position_embeddings") / original
        ratio = settings.get_float("factor", ratio)
        default = (
            math.sqrt(1 + math.log(ratio) / math.log(original))
            if ratio > 1 and original > 1
            else 1.0
        )
        keys += [
            ArchKey("rope.scaling.type", "string", "longrope"),
            ArchKey(
                "rope.scaling.attn_factor",
                "float32",
                settings.get_float("attention_factor", default),
            ),
        ]
    return keys


def longrope_factors(config: CheckpointConfig) -> "dict[str, F32]":
    """Return LongRoPE's two tensors of frequency factors `[pairs]`, for long and for short
    contexts, with one factor for each rotary pair. For other rotary settings, return no tensors.

    Raises UserError for malformed factors.
    """
    import numpy as np

    if not (settings := longrope_settings(config)):
        return {}
    tensors = {}
    for kind in ("long", "short"):
        factors, count = settings.values.get(f"{kind}_factor"), rope.rotary_width(config) // 2
        complete = isinstance(factors, list) and len(factors) == count
        if not complete or not all(
            type(value) in (int, float) and 0 < value < 1e30 for value in factors or ()
        ):
            raise UserError(
                f"{config.location}: {kind}_factor should be {count} positive numbers",
                hint="fetch it again",
            )
        tensors[f"rope_factors_{kind}.weight"] = np.array(factors, np.float32)
    return tensors


def required_shapes(config: CheckpointConfig) -> Shapes:
    """Return the shapes of all tensors that a converted model must have, rows first, by
    GGUF name.
    """
    return block_tensors.embedding_and_head(config) | block_tensors.repeat_for_blocks(
        config,
        block_tensors.fused_attention_shapes(config),
        block_tensors.fused_feed_forward_shapes(config),
    )


PHI3 = Arch(
    name="phi3",
    kind="PHI3",
    hf=("Phi3ForCausalLM",),
    keys=keys,
    required_shapes=required_shapes,
    check=check,
    defaults=DEFAULTS,
    extra_tensors=longrope_factors,
)

ARCHS = (PHI3,)
