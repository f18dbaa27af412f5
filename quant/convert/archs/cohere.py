"""Command R and Command R7B (Cohere 2): interleaved rotary pairs, norms that subtract the mean,
and one input for attention and feed-forward. Cohere 2 has a sliding window on all layers except
every fourth one, and rotary positions only in layers with a window.

Follows conversion/command_r.py, src/models/command-r.cpp and src/models/cohere2.cpp of llama.cpp,
which always ties the head to the embedding. In Command R, llama.cpp expects norms of the heads in
models of 64 layers or more.
"""

from dataclasses import replace

from quant.checkpoint.config import CheckpointConfig
from quant.convert.parts import block_tensors, checks, layout, metadata
from quant.convert.parts.base import Arch, ArchKey, Shapes

DEFAULTS = {  # defaults of transformers' CohereConfig
    "layer_norm_eps": 1e-5,
    "logit_scale": 0.0625,
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
}
DEFAULTS2 = {  # defaults of transformers' Cohere2Config
    "layer_norm_eps": 1e-5,
    "logit_scale": 0.0625,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}
PERIOD_LAYERS = 4  # the last layer of each period of Cohere 2 attends to all positions
HEAD_NORM_LAYERS = 64  # Command R models of so many layers have norms of the heads in llama.cpp


def problems(config: CheckpointConfig) -> list[tuple[object, str]]:
    """Return the problems (see checks.py) of settings that llama.cpp computes differently for
    Command R and for Cohere 2.
    """
    return [
        *checks.common_problems(config),
        checks.problem_head_width(config),
        checks.problem_biases(config, "attention_bias"),
        (
            not config.get_bool("tie_word_embeddings"),
            "its head is not tied to the embedding",
        ),
    ]


def check(config: CheckpointConfig) -> list[str]:
    """Raise UserError for settings that llama.cpp's command-r computes differently. Return
    no notes.
    """
    layers, has_norms = layout.layer_count(config), config.get_bool("use_qk_norm")
    checks.raise_problems(
        config,
        [
            *problems(config),
            (
                has_norms != (layers >= HEAD_NORM_LAYERS),
                f"its use_qk_norm is {has_norms}, and it has {layers} layers: llama.cpp expects "
                f"norms of the heads from {HEAD_NORM_LAYERS} layers on",
            ),
        ],
    )
    return []


def sliding_layers(config: CheckpointConfig) -> list[bool]:
    """Return a list with one entry for each layer: whether the layer has a sliding window."""
    return layout.sliding_layers(
        config, config.get_int("sliding_window_pattern", default=PERIOD_LAYERS)
    )


def check2(config: CheckpointConfig) -> list[str]:
    """Raise UserError for settings that llama.cpp's cohere2 computes differently. Return
    no notes.
    """
    rotary_part = config.values.get("rotary_pct", 1)
    checks.raise_problems(
        config,
        [
            *problems(config),
            (rotary_part != 1, f"its rotary_pct is {rotary_part}"),
            (
                config.values["sliding_window"] is None or not any(sliding_layers(config)),
                "none of its layers has a sliding window",
            ),
        ],
    )
    return []


def keys(config: CheckpointConfig) -> list[ArchKey]:
    """Return the common metadata keys and the factor of the logits. The context length is
    model_max_length if config.json has it: the first models were trained on more positions than
    max_position_embeddings.
    """
    length = ArchKey(
        "context_length", "uint32", config.get_int("model_max_length", "max_position_embeddings")
    )
    return [
        *(
            length if key.name == length.name else key
            for key in metadata.layer_norm_keys(config, config.get_float("layer_norm_eps"))
        ),
        ArchKey("logit_scale", "float32", config.get_float("logit_scale")),
    ]


def keys2(config: CheckpointConfig) -> list[ArchKey]:
    """Return Command R's metadata keys, those of the sliding window, and the rotary width of a
    head.
    """
    return [
        *keys(config),
        *metadata.sliding_window_keys(config, sliding_layers(config), PERIOD_LAYERS),
        ArchKey("rope.dimension_count", "uint32", layout.head_counts(config)[2]),
    ]


def required_shapes(config: CheckpointConfig) -> Shapes:
    """Return the shapes of all tensors that a converted model must have, rows first, by
    GGUF name.
    """
    block = block_tensors.attention_shapes(config) | block_tensors.feed_forward_shapes(config)
    del block["ffn_norm.weight"]
    if config.get_bool("use_qk_norm"):
        block |= block_tensors.separate_head_norm_shapes(config)
    return block_tensors.embedding_and_head(config) | block_tensors.repeat_for_blocks(config, block)


COMMAND_R = Arch(
    name="command-r",
    kind="COMMAND_R",
    hf=("CohereForCausalLM",),
    keys=keys,
    required_shapes=required_shapes,
    check=check,
    defaults=DEFAULTS,
)
COHERE2 = replace(
    COMMAND_R,
    name="cohere2",
    kind="COHERE2",
    hf=("Cohere2ForCausalLM",),
    keys=keys2,
    check=check2,
    defaults=DEFAULTS2,
)

ARCHS = (COMMAND_R, COHERE2)
