"""SmolLM3: Llama without rotary positions in every fourth layer. llama.cpp supports no other
pattern of layers.

Follows SmolLM3Model of llama.cpp (conversion/llama.py, src/models/smollm3.cpp).
"""

from dataclasses import replace

from quant.checkpoint.config import CheckpointConfig
from quant.convert.archs import llama
from quant.convert.parts import checks, layout
from quant.convert.parts.base import no_tensors

# Every layer whose number from 1 is a multiple of this has no rotary positions
# (n_no_rope_layer_step in llama.cpp).
NO_ROPE_STEP_LAYERS = 4


def check(config: CheckpointConfig) -> list[str]:
    """Raise UserError for settings that llama.cpp's smollm3 computes differently. Return
    no notes.
    """
    expected_layers = [
        (layer + 1) % NO_ROPE_STEP_LAYERS != 0 for layer in range(layout.layer_count(config))
    ]
    checks.raise_problems(
        config,
        [
            *checks.common_problems(config),
            checks.problem_biases(config, "attention_bias", "mlp_bias"),
            (
                _rotary_layers(config, len(expected_layers)) != expected_layers,
                f"no_rope_layers does not leave out exactly every {NO_ROPE_STEP_LAYERS}th layer",
            ),
            (
                layout.has_sliding_window(config, lambda layer, _: not expected_layers[layer]),
                "some of its layers have a sliding window",
            ),
        ],
    )
    return []


def _rotary_layers(config: CheckpointConfig, count: int) -> list[bool]:
    """Return a list with one entry for each layer: whether the layer has rotary positions. Without
    no_rope_layers in the config, the list has `count` entries.
    """
    flags = config.values.get("no_rope_layers")
    if flags is not None:
        return [bool(layer) for layer in flags] if isinstance(flags, list) else []
    step = config.get_int("no_rope_layer_interval", default=NO_ROPE_STEP_LAYERS)
    return [(layer + 1) % step != 0 for layer in range(count)]


SMOLLM3 = replace(
    llama.LLAMA,
    name="smollm3",
    kind="SMOLLM3",
    hf=("SmolLM3ForCausalLM",),
    check=check,
    optional_shapes=no_tensors,
    extra_tensors=no_tensors,
    defaults={"rope_theta": 2e6, "num_key_value_heads": 4, "tie_word_embeddings": True},
)

ARCHS = (SMOLLM3,)
