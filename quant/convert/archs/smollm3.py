"""SmolLM3: Llama without rotary positions in every fourth layer, a step that llama.cpp has fixed.

Follows SmolLM3Model of llama.cpp (conversion/llama.py, src/models/smollm3.cpp).
"""

from dataclasses import replace

from quant.checkpoint.config import Config
from quant.convert.archs import blocks, llama
from quant.convert.archs.base import MAX_LAYERS, nothing

STEP = 4  # layers; n_no_rope_layer_step in llama.cpp


def check(config: Config) -> list[str]:
    """Raise UserError for settings that llama.cpp's smollm3 computes differently."""
    fixed = [(layer + 1) % STEP != 0 for layer in range(min(blocks.layers(config), MAX_LAYERS))]
    blocks.refuse(
        config,
        [
            *blocks.problems(config),
            blocks.biased(config, "attention_bias", "mlp_bias"),
            (
                _rotary_layers(config, len(fixed)) != fixed,
                f"no_rope_layers does not leave out exactly every {STEP}th layer",
            ),
            (
                blocks.windowed(config, lambda layer, _: not fixed[layer]),
                "some of its layers have a sliding window",
            ),
        ],
    )
    return []


def _rotary_layers(config: Config, count: int) -> list[bool]:
    """Return for each layer whether it is rotary."""
    marks = config.values.get("no_rope_layers")
    if marks is not None:
        return [bool(layer) for layer in marks] if isinstance(marks, list) else []
    step = config.number("no_rope_layer_interval", default=STEP)
    return [(layer + 1) % step != 0 for layer in range(count)]


SMOLLM3 = replace(
    llama.LLAMA,
    name="smollm3",
    kind="SMOLLM3",
    hf=("SmolLM3ForCausalLM",),
    check=check,
    optional=nothing,
    extra=nothing,
    defaults={"rope_theta": 2e6, "num_key_value_heads": 4, "tie_word_embeddings": True},
)

ARCHS = (SMOLLM3,)
