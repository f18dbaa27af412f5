"""EXAONE 4: norms after attention and feed-forward instead of before them, and norms of each query
head and each key head. The 32B model has a sliding window on all layers except every fourth one,
and only the layers with a window have rotary positions.

Follows Exaone4Model of llama.cpp (conversion/exaone.py, src/models/exaone4.cpp). llama.cpp
recognizes the 32B model by its number of layers, and gives other models no window.
"""

from quant.checkpoint.config import CheckpointConfig
from quant.convert.parts import block_tensors, checks, layout, metadata, rope
from quant.convert.parts.base import Arch, ArchKey, Shapes

PERIOD_LAYERS = 4  # the last layer of each period attends to all positions
HYBRID_MODEL_LAYERS = 64  # layers of the only model for which llama.cpp has a sliding window
DEFAULTS = {  # defaults of transformers' Exaone4Config
    "num_key_value_heads": 32,
    "rms_norm_eps": 1e-5,
    "sliding_window": 4096,
    "sliding_window_pattern": PERIOD_LAYERS,
}


def sliding_layers(config: CheckpointConfig) -> list[bool]:
    """Return a list with one entry for each layer: whether the layer has a sliding window."""
    has_types = config.values.get("layer_types") is not None
    period = PERIOD_LAYERS if has_types else config.get_int("sliding_window_pattern")
    return layout.sliding_layers(config, period)


def check(config: CheckpointConfig) -> list[str]:
    """Raise UserError for settings that llama.cpp's exaone4 computes differently. Return
    no notes.
    """
    has_window = config.values["sliding_window"] is not None
    hybrid = layout.layer_count(config) == HYBRID_MODEL_LAYERS
    checks.raise_problems(
        config,
        [
            *checks.common_problems(config, rope_types=rope.ROPE_TYPES_WITH_FACTORS),
            checks.problem_head_width(config),
            (
                has_window != any(sliding_layers(config)),
                "sliding_window and layer_types contradict each other",
            ),
            (
                has_window and not hybrid,
                f"it has a sliding window, but not {HYBRID_MODEL_LAYERS} layers: llama.cpp "
                "ignores the window",
            ),
            (
                hybrid and not has_window,
                f"llama.cpp gives a model of {HYBRID_MODEL_LAYERS} layers a sliding window",
            ),
        ],
    )
    return []


def keys(config: CheckpointConfig) -> list[ArchKey]:
    """Return the common metadata keys and those of the sliding window, if some layer has one."""
    entries, layers = metadata.common_keys(config), sliding_layers(config)
    if any(layers):
        entries += metadata.sliding_window_keys(config, layers, PERIOD_LAYERS)
    return entries


def required_shapes(config: CheckpointConfig) -> Shapes:
    """Return the shapes of all tensors that a converted model must have, rows first, by
    GGUF name.
    """
    block = (
        block_tensors.attention_shapes(config)
        | block_tensors.head_norm_shapes(config)
        | block_tensors.feed_forward_shapes(config)
        | block_tensors.post_norm_shapes(config)
    )
    del block["attn_norm.weight"], block["ffn_norm.weight"]
    return block_tensors.embedding_and_head(config) | block_tensors.repeat_for_blocks(config, block)


EXAONE4 = Arch(
    name="exaone4",
    kind="EXAONE4",
    hf=("Exaone4ForCausalLM",),
    keys=keys,
    required_shapes=required_shapes,
    check=check,
    defaults=DEFAULTS,
    extra_tensors=rope.llama3_rope_factors,
)

ARCHS = (EXAONE4,)
