"""ModernBERT: an encoder with rotary positions whose layers see all or only near positions, and
rerankers made from it.

Follows ModernBertModel of llama.cpp (conversion/bert.py, src/models/modern-bert.cpp). Differences:
the rotary base of layers with a window is always written, and classifiers as in bert.py. llama.cpp
computes GELU from a table of 16-bit values, so that vectors differ by about 0.0002 of their length.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quant.checkpoint.config import CheckpointConfig
from quant.checkpoint.safetensors import Tensors
from quant.convert.archs import bert
from quant.convert.parts import block_tensors, checks, layout, rope
from quant.convert.parts.base import Arch, ArchKey, Shapes

PERIOD = 3  # every third layer sees all positions, the first one included
WINDOW, FULL = "sliding_attention", "full_attention"
THETA_SETTINGS = {FULL: ("global_rope_theta", 160000.0), WINDOW: ("local_rope_theta", 10000.0)}
DEFAULTS: Mapping[str, Any] = {
    "intermediate_size": 1152,
    "hidden_activation": "gelu",
    "max_position_embeddings": 8192,
    "norm_eps": 1e-5,
    "local_attention": 128,
    "classifier_pooling": "cls",
    "classifier_activation": "gelu",
}


def window_layers(config: CheckpointConfig) -> list[bool]:
    """Return a list with one entry for each layer: whether it sees only near positions. Raises
    UserError if layer_types is malformed.
    """
    if config.values.get("layer_types") is not None:
        return layout.layers_of_kind(config, "layer_types", (WINDOW,), (FULL,))
    period = config.get_int("global_attn_every_n_layers", default=PERIOD)
    return [bool(layer % period) for layer in range(layout.layer_count(config))]


def rope_settings(config: CheckpointConfig, kind: str) -> CheckpointConfig:
    """Return the rotary settings of one kind of layers, in the old or the new spelling."""
    name, default = THETA_SETTINGS[kind]
    theta = config.values.get(name)
    values = {**config.values, "rope_theta": default if theta is None else theta}
    return rope.rope_settings(replace(config, values=values), kind)


def check(config: CheckpointConfig) -> list[str]:
    """Raise UserError for settings that llama.cpp's modern-bert computes differently. Return no
    notes.
    """
    rope_types = [rope_settings(config, kind).values["rope_type"] for kind in (FULL, WINDOW)]
    activation = config.values.get("hidden_activation")
    checks.raise_problems(
        config,
        [
            *bert.encoder_problems(config),
            (activation not in ("gelu", "silu"), f"its activation is {activation}"),
            (rope_types != ["default"] * 2, "its positions are scaled"),
            checks.problem_biases(
                config, "norm_bias", "attention_bias", "mlp_bias", "classifier_bias"
            ),
            (
                bert.is_classifier(config) and config.values.get("classifier_activation") != "gelu",
                f"its head's activation is {config.values.get('classifier_activation')}",
            ),
            (
                config.values.get("classifier_pooling") not in ("cls", "mean"),
                f"its classifier_pooling is {config.values.get('classifier_pooling')}",
            ),
        ],
    )
    return []


def keys(config: CheckpointConfig) -> list[ArchKey]:
    """Return the metadata keys."""
    layers = window_layers(config)
    period = config.get_int("global_attn_every_n_layers", default=PERIOD)
    is_periodic = layers == [bool(layer % period) for layer in range(len(layers))]
    pooling = bert.POOLING_MODES.get(str(config.values.get("classifier_pooling")), bert.CLS)
    return [
        ArchKey("block_count", "uint32", len(layers)),
        ArchKey("context_length", "uint32", config.get_int("max_position_embeddings")),
        ArchKey("embedding_length", "uint32", config.get_int("hidden_size")),
        ArchKey("feed_forward_length", "uint32", config.get_int("intermediate_size")),
        ArchKey("attention.head_count", "uint32", config.get_int("num_attention_heads")),
        ArchKey("attention.layer_norm_epsilon", "float32", config.get_float("norm_eps")),
        ArchKey("attention.causal", "bool", False),
        ArchKey("rope.freq_base", "float32", rope_settings(config, FULL).get_float("rope_theta")),
        ArchKey(
            "rope.freq_base_swa", "float32", rope_settings(config, WINDOW).get_float("rope_theta")
        ),
        ArchKey("rope.scaling.type", "string", "none"),
        ArchKey("attention.sliding_window", "uint32", config.get_int("local_attention")),
        ArchKey("attention.sliding_window_pattern", "uint32", period)
        if is_periodic
        else ArchKey("attention.sliding_window_pattern", "array:bool", layers),
        ArchKey("hidden_activation", "string", str(config.values.get("hidden_activation"))[:16]),
        ArchKey("vocab_size", "uint32", config.get_int("vocab_size")),
        *bert.pooling_keys(config),
        ArchKey("classifier.pooling_type", "uint32", pooling),
    ]


def required_shapes(config: CheckpointConfig) -> Shapes:
    """Return the shapes of all tensors that a converted model must have, rows first, by
    GGUF name. The first layer has no norm before its attention.
    """
    hidden = config.get_int("hidden_size")
    block: Shapes = {
        "attn_qkv.weight": (3 * hidden, hidden),
        "attn_output.weight": (hidden, hidden),
        **block_tensors.fused_feed_forward_shapes(config),
    }
    norm: Shapes = {"attn_norm.weight": (hidden,)}
    shapes: Shapes = {
        "token_embd.weight": (config.get_int("vocab_size"), hidden),
        "token_embd_norm.weight": (hidden,),
        "output_norm.weight": (hidden,),
    }
    if bert.is_classifier(config):
        count = len(bert.labels(config))
        shapes |= {
            "cls.weight": (hidden, hidden),
            "cls.norm.weight": (hidden,),
            "cls.output.weight": (count, hidden),
            "cls.output.bias": (count,),
        }
    return shapes | block_tensors.shapes_by_block(
        layout.layer_count(config), lambda layer: block | norm if layer else block
    )


def prepare(config: CheckpointConfig, tensors: Tensors) -> Tensors:
    """Return the tensors under names that the gguf package knows, without the head for
    training.
    """
    has_head = bert.is_classifier(config)

    def known_name(name: str) -> str | None:
        known = name.removeprefix("model.")
        if has_head:
            return re.sub(r"^classifier\.", "classifier.out_proj.", known)
        return None if known.startswith(("head.", "decoder.")) else known

    return block_tensors.rename_tensors(tensors, known_name)


MODERN_BERT = Arch(
    name="modern-bert",
    kind="MODERN_BERT",
    hf=("ModernBertModel", "ModernBertForMaskedLM", "ModernBertForSequenceClassification"),
    keys=keys,
    required_shapes=required_shapes,
    check=check,
    defaults=DEFAULTS,
    prepare=prepare,
)

ARCHS = (MODERN_BERT,)
