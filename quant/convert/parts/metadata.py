"""Metadata keys that most model families have. Follows TextModel.set_gguf_parameters of llama.cpp
(conversion/base.py).
"""

from quant.checkpoint.config import CheckpointConfig
from quant.convert.parts import layout, rope
from quant.convert.parts.base import ArchKey


def common_keys(config: CheckpointConfig) -> list[ArchKey]:
    """Return the metadata keys of families with rotary heads and a gated feed-forward, in
    llama.cpp's order.
    """
    (count, kv_heads, head_dim), settings = layout.head_counts(config), rope.rope_settings(config)
    entries = [
        ArchKey("block_count", "uint32", layout.layer_count(config)),
        ArchKey("context_length", "uint32", config.get_int("max_position_embeddings")),
        ArchKey("embedding_length", "uint32", config.get_int("hidden_size")),
        ArchKey("feed_forward_length", "uint32", config.get_int("intermediate_size")),
        ArchKey("attention.head_count", "uint32", count),
        ArchKey("attention.head_count_kv", "uint32", kv_heads),
        ArchKey("rope.freq_base", "float32", settings.get_float("rope_theta")),
        ArchKey(
            "attention.layer_norm_rms_epsilon", "float32", config.get_float("rms_norm_eps", 1e-6)
        ),
        ArchKey("vocab_size", "uint32", config.get_int("vocab_size")),
    ]
    if config.values.get("head_dim") is not None:
        entries += [
            ArchKey("attention.key_length", "uint32", head_dim),
            ArchKey("attention.value_length", "uint32", head_dim),
        ]
    return [*entries, *rope.rope_scaling_keys(settings)]


def layer_norm_keys(config: CheckpointConfig, eps: float) -> list[ArchKey]:
    """Return the common metadata keys for a family whose norms also subtract the mean. `eps` is
    the number that is added to the variance.
    """
    entry = ArchKey("attention.layer_norm_epsilon", "float32", eps)
    return [
        entry if key.name == "attention.layer_norm_rms_epsilon" else key
        for key in common_keys(config)
    ]


def sliding_window_keys(config: CheckpointConfig, layers: list[bool], period: int) -> list[ArchKey]:
    """Return the metadata keys of a sliding window. `layers` says for each layer whether it has the
    window.

    llama.cpp assumes that all layers of the family have a window except each `period`-th one. If
    `layers` differs from this pattern, a key with the pattern is added.
    """
    keys = [ArchKey("attention.sliding_window", "uint32", config.get_int("sliding_window"))]
    if layers != [bool((layer + 1) % period) for layer in range(len(layers))]:
        keys.append(ArchKey("attention.sliding_window_pattern", "array:bool", layers))
    return keys
