"""Mixtral: Mistral with experts as its feed-forward; llama.cpp runs it as llama.

Follows MixtralModel of llama.cpp (conversion/llama.py, src/models/llama.cpp).
"""

from dataclasses import replace

from quant.checkpoint.config import Config
from quant.convert.archs import blocks, experts, llama
from quant.convert.archs.base import Key, Shapes


def check(config: Config) -> list[str]:
    """Raise UserError for settings that llama.cpp's llama computes differently; return notes for
    the user.
    """
    blocks.refuse(
        config, [*blocks.problems(config, ropes=blocks.FACTORED), *experts.problems(config)]
    )
    return llama.window(config)


def keys(config: Config) -> list[Key]:
    """Return Llama's keys and the experts' keys."""
    return [*llama.keys(config), *experts.keys(config)]


def expected(config: Config) -> Shapes:
    """Return the required tensors with their shapes, rows first."""
    return blocks.ends(config) | blocks.blocks(
        config,
        blocks.attention(config),
        {"ffn_norm.weight": (config.number("hidden_size"),)},
        experts.shapes(config, config.number("intermediate_size")),
    )


MIXTRAL = replace(
    llama.LLAMA,
    hf=("MixtralForCausalLM",),
    keys=keys,
    expected=expected,
    optional=lambda config: {},
    check=check,
    prepare=experts.gather,
    defaults={
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
)

ARCHS = (MIXTRAL,)
