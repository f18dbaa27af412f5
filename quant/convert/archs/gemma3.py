"""Gemma 3, text only: Gemma 2 with norms of queries and keys and with two rotary bases, but without
a cap on attention scores.

Follows conversion/gemma.py and src/models/gemma3.cpp of llama.cpp. The rotary settings of global
layers are in rope_theta and rope_scaling, or in full_attention of rope_parameters. Those of sliding
layers are in rope_local_base_freq, or in sliding_attention of rope_parameters. Sliding layers never
have scaled positions.
"""

from typing import Any

from quant.checkpoint import tensor_views
from quant.checkpoint.config import CheckpointConfig
from quant.checkpoint.safetensors import Tensors
from quant.convert.archs import gemma2
from quant.convert.parts import block_tensors, checks, layout, metadata, rope
from quant.convert.parts.base import Arch, ArchKey, Shapes

DEFAULTS = {  # defaults of transformers' Gemma3TextConfig, without its vocab_size (see Arch)
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131072,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}
PERIOD_LAYERS = 6  # the last layer of each period attends to all positions
LARGE_MODEL_LAYERS = 62  # layers of the 27B model, which scales queries differently


def local_rope_settings(config: CheckpointConfig) -> CheckpointConfig:
    """Return the rotary settings of the layers with a sliding window."""
    base, rope_parameters = (
        config.values.get("rope_local_base_freq"),
        config.values.get("rope_parameters"),
    )
    settings = (
        rope_parameters.get("sliding_attention") if isinstance(rope_parameters, dict) else None
    )
    values: dict[str, Any] = {"rope_theta": 10000.0 if base is None else base}
    return rope.rope_settings(
        CheckpointConfig(values | {"rope_parameters": settings}, config.location)
    )


def sliding_layers(config: CheckpointConfig) -> list[bool]:
    """Return a list with one entry for each layer: whether the layer has a sliding window."""
    return layout.sliding_layers(
        config,
        config.get_int("sliding_window_pattern", "_sliding_window_pattern", default=PERIOD_LAYERS),
    )


def check(config: CheckpointConfig) -> list[str]:
    """Raise UserError for settings that llama.cpp's gemma3 computes differently. Return
    no notes.
    """
    local_settings = local_rope_settings(config).values
    checks.raise_problems(
        config,
        [
            *gemma2.gemma_problems(config, LARGE_MODEL_LAYERS),
            (config.values.get("attn_logit_softcapping") is not None, "its attention is capped"),
            (config.values["sliding_window"] is None, "its sliding_window is null"),
            (local_settings["rope_type"] != "default", "its sliding layers have scaled positions"),
            checks.problem_undivided_rope(config),
        ],
    )
    return []


def keys(config: CheckpointConfig) -> list[ArchKey]:
    """Return the common metadata keys, then those of the cap on logits, if there is one, and of the
    sliding window with its rotary base.
    """
    entries, layers = metadata.common_keys(config), sliding_layers(config)
    if config.values.get("final_logit_softcapping") is not None:
        entries.append(
            ArchKey(
                "final_logit_softcapping", "float32", config.get_float("final_logit_softcapping")
            )
        )
    if any(layers):
        entries.append(
            ArchKey(
                "rope.freq_base_swa", "float32", local_rope_settings(config).get_float("rope_theta")
            )
        )
        entries += metadata.sliding_window_keys(config, layers, PERIOD_LAYERS)
    return entries


def required_shapes(config: CheckpointConfig) -> Shapes:
    """Return the shapes of all tensors that a converted model must have, rows first, by
    GGUF name.
    """
    head_dim = layout.head_counts(config)[2]
    norms: Shapes = {"attn_q_norm.weight": (head_dim,), "attn_k_norm.weight": (head_dim,)}
    return gemma2.required_shapes(config) | block_tensors.repeat_for_blocks(config, norms)


def prepare(config: CheckpointConfig, tensors: Tensors) -> Tensors:
    """Return the tensors without the rows of embedding and head for which there is no token. The
    tokenizer may have fewer tokens than these tensors have rows.
    """
    size, result = config.get_int("vocab_size"), dict(tensors)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        if (tensor := tensors.get(name)) and len(tensor.shape) == 2 and tensor.shape[0] > size:
            result[name] = tensor_views.pick_range(tensor, 0, size)
    return result


GEMMA3 = Arch(
    name="gemma3",
    kind="GEMMA3",
    hf=("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"),
    keys=keys,
    required_shapes=required_shapes,
    check=check,
    defaults=DEFAULTS,
    vocab_size_from_tokenizer=True,
    prepare=prepare,
    ops=gemma2.NORM_SHIFT_OPS,
)

ARCHS = (GEMMA3,)
