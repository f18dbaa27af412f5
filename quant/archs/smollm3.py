"""SmolLM3: llama whose every fourth layer does without rotary positions; llama.cpp has that number
fixed.

Follows SmolLM3Model of llama.cpp (conversion/llama.py, src/models/smollm3.cpp).
"""

from dataclasses import replace

from quant.archs import common, llama
from quant.archs.base import MAX_LAYERS, Config, nothing

STEP = 4  # llama.cpp, n_no_rope_layer_step


def check(config: Config) -> list[str]:
    """Refuse what llama.cpp's smollm3 would not compute alike."""
    fixed = [(layer + 1) % STEP != 0 for layer in range(min(common.layers(config), MAX_LAYERS))]
    common.refuse(
        config,
        [
            *common.problems(config),
            common.biased(config, "attention_bias", "mlp_bias"),
            (
                _rotary(config, len(fixed)) != fixed,
                f"no_rope_layers is not every layer but each {STEP}th",
            ),
            (
                common.windowed(config, lambda layer, _: not fixed[layer]),
                "some of its layers attend to a window only",
            ),
        ],
    )
    return []


def _rotary(config: Config, count: int) -> list[bool]:
    """Which layers are rotary."""
    given = config.values.get("no_rope_layers")
    if given is not None:
        return [bool(layer) for layer in given] if isinstance(given, list) else []
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
