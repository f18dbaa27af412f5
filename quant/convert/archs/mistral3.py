"""Mistral Small 3.1 and 3.2, and Ministral 3 (text part): a Llama whose queries Ministral 3 scales
by the logarithm of their position.

Follows conversion/mistral3.py and src/models/mistral3.cpp of llama.cpp. Mistral's multimodal class
contains text models of three types: mistral and ministral3 belong to this family, mistral4 to that
in mistral4.py. beta_fast and beta_slow of yarn are llama.cpp's defaults and not written.
"""

from dataclasses import replace

from quant.checkpoint.config import CheckpointConfig
from quant.convert.archs import llama, mistral4
from quant.convert.parts import checks, rope
from quant.convert.parts.base import Arch, ArchKey

# Defaults of transformers' Ministral3Config, without its rope_parameters.
DEFAULTS = {
    "vocab_size": 131072,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 34,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-5,
}
ATTN_FACTOR_KEY = "rope.scaling.attn_factor"


def check(config: CheckpointConfig) -> list[str]:
    """Raise UserError for settings that llama.cpp's mistral3 computes differently; return notes for
    the user.
    """
    settings = rope.rope_settings(config).values
    is_scaled = settings.get(mistral4.BETA_KEY) is not None
    checks.raise_problems(
        config,
        [
            *checks.common_problems(config, rope_types=rope.ROPE_TYPES_WITH_FACTORS),
            (config.values.get("num_local_experts"), "it is a mixture of experts"),
            (
                is_scaled and settings["rope_type"] != "yarn",
                f"it has {mistral4.BETA_KEY}, but its rope type is not yarn",
            ),
            (
                needs_scale(config) and not is_scaled,
                f"its rope_parameters have no {mistral4.BETA_KEY}",
            ),
        ],
    )
    return checks.window_notes(config, "mistral3")


def needs_scale(config: CheckpointConfig) -> bool:
    """Return whether the text model is a Ministral 3."""
    return "ministral3" in (text_type(config), config.values.get("model_type"))


def keys(config: CheckpointConfig) -> list[ArchKey]:
    """Return the keys of a Llama, then those of the scale of queries.

    llama.cpp divides attn_factor by 1 + w ln(factor) / 10, where w is the key yarn_log_multiplier.
    Without this key, w is 0; the attn_factor that _yarn() in rope.py wrote is right for that
    case.
    """
    entries, settings = llama.keys(config), rope.rope_settings(config)
    if settings.values["rope_type"] != "yarn" or settings.values.get(mistral4.BETA_KEY) is None:
        return entries
    weight = settings.get_float("mscale_all_dim", 1.0)
    factor = (
        rope.yarn_attention_factor(settings)
        * rope.yarn_scale(settings, weight)
        / rope.yarn_scale(settings)
    )
    entries = [
        replace(key, value=factor) if key.name == ATTN_FACTOR_KEY else key for key in entries
    ]
    return [
        *(key for key in entries if key.name != ATTN_FACTOR_KEY or abs(factor - 1) > 1e-9),
        ArchKey("rope.scaling.yarn_log_multiplier", "float32", weight),
        ArchKey("attention.temperature_scale", "float32", settings.get_float(mistral4.BETA_KEY)),
    ]


MISTRAL3 = replace(
    llama.LLAMA,
    name="mistral3",
    kind="MISTRAL3",
    hf=("Ministral3ForCausalLM",),
    keys=keys,
    check=check,
    defaults=DEFAULTS,
)


def text_type(config: CheckpointConfig) -> object:
    """Return the type of the text model in a multimodal one."""
    text = config.values.get("text_config")
    return text.get("model_type") if isinstance(text, dict) else None


def select(config: CheckpointConfig) -> Arch:
    """Return the family of the text model in a multimodal one."""
    return mistral4.MISTRAL4 if text_type(config) == "mistral4" else MISTRAL3


def normalize(config: CheckpointConfig) -> CheckpointConfig:
    """Return the config with the defaults, and in the spelling, of the text model's family."""
    family, kind = select(config), text_type(config)
    defaults = llama.MISTRAL.defaults if kind == "mistral" else family.defaults
    return family.normalize(replace(config, values={**defaults, **config.values}))


MULTIMODAL = replace(
    MISTRAL3,
    hf=("Mistral3ForConditionalGeneration",),
    defaults={},
    normalize=normalize,
    select=select,
)

ARCHS = (MISTRAL3, MULTIMODAL)
