"""OLMo 3: OLMo 2 with a sliding window on all layers except every fourth one. Only the layers that
attend to all positions have scaled rotary positions.

Follows Olmo2Model of llama.cpp (conversion/olmo.py, src/models/olmo2.cpp). llama.cpp computes all
layers with one rotary base.
"""

from dataclasses import replace

from quant.checkpoint.config import CheckpointConfig
from quant.convert.archs import olmo2
from quant.convert.parts import checks, layout, metadata, rope
from quant.convert.parts.base import ArchKey

PERIOD_LAYERS = 4  # the last layer of each period attends to all positions
DEFAULT_BASE = 500000.0  # default_theta of transformers' Olmo3Config


def sliding_rope_settings(config: CheckpointConfig) -> CheckpointConfig:
    """Return the rotary settings of the layers with a sliding window. A rotary base at the root of
    config.json does not count for them, as in transformers.
    """
    parameters = config.values.get("rope_parameters")
    settings = parameters.get("sliding_attention") if isinstance(parameters, dict) else None
    return rope.rope_settings(
        CheckpointConfig({"rope_theta": DEFAULT_BASE, "rope_parameters": settings}, config.location)
    )


def check(config: CheckpointConfig) -> list[str]:
    """Raise UserError for settings that llama.cpp's olmo2 computes differently. Return no notes."""
    sliding = sliding_rope_settings(config)
    base, sliding_base = (
        settings.get_float("rope_theta") for settings in (rope.rope_settings(config), sliding)
    )
    checks.raise_problems(
        config,
        [
            *olmo2.problems(config),
            checks.problem_undivided_rope(config),
            (
                sliding.values["rope_type"] != "default",
                "its sliding layers have scaled positions",
            ),
            (
                base != sliding_base,
                f"its layers have two rotary bases, {base:g} and {sliding_base:g}",
            ),
        ],
    )
    return []


def keys(config: CheckpointConfig) -> list[ArchKey]:
    """Return the common metadata keys and those of the sliding window, if some layer has one."""
    entries, layers = metadata.common_keys(config), layout.sliding_layers(config, PERIOD_LAYERS)
    if any(layers):
        entries += metadata.sliding_window_keys(config, layers, PERIOD_LAYERS)
    return entries


OLMO3 = replace(
    olmo2.OLMO2,
    hf=("Olmo3ForCausalLM",),
    keys=keys,
    check=check,
    defaults={"rms_norm_eps": 1e-5, "rope_theta": DEFAULT_BASE, "sliding_window": 4096},
)

ARCHS = (OLMO3,)
