"""Llama and Mistral: grouped-query attention, rotary halves, SiLU-gated feed-forward, RMS norms.

Follows conversion/llama.py of llama.cpp; reads both spellings of rotary settings, rope_theta with
rope_scaling and rope_parameters.
"""

from dataclasses import replace

from quant.archs import common
from quant.archs.base import Arch, Config, Key, Shapes


def check(config: Config) -> list[str]:
    """Refuse what llama.cpp's llama would not compute alike; returns what the user should know."""
    experts = (config.values.get("num_local_experts"), "it is a mixture of experts")
    common.refuse(config, [*common.problems(config, ropes=common.FACTORED), experts])
    return window(config)


def window(config: Config) -> list[str]:
    """What to say about a window that llama.cpp's llama does not have."""
    window = config.values.get("sliding_window")
    if isinstance(window, int) and window < config.number("max_position_embeddings"):
        return [
            f"this model attends to {window} positions; llama.cpp's llama to all: beyond them answers may differ"
        ]
    return []


def keys(config: Config) -> list[Key]:
    """The ordinary keys, and how much of a head is rotary: all of it."""
    return [*common.keys(config), Key("rope.dimension_count", "uint32", common.heads(config)[2])]


def expected(config: Config) -> Shapes:
    """The tensors that must be there, with their shapes, rows first."""
    return common.ends(config) | common.blocks(
        config, common.attention(config), common.gated(config)
    )


def optional(config: Config) -> Shapes:
    """Biases: some finetunes have them, and llama.cpp takes them where they are."""
    hidden, ff = config.number("hidden_size"), config.number("intermediate_size")
    others: Shapes = {
        "attn_output.bias": (hidden,),
        "ffn_gate.bias": (ff,),
        "ffn_up.bias": (ff,),
        "ffn_down.bias": (hidden,),
    }
    return common.blocks(config, common.biases(config), others)


LLAMA = Arch(
    name="llama",
    kind="LLAMA",
    hf=("LlamaForCausalLM",),
    keys=keys,
    expected=expected,
    optional=optional,
    check=check,
    ops=common.INTERLEAVED,
    extra=common.rope_factors,
)

MISTRAL = replace(
    LLAMA, hf=("MistralForCausalLM",), defaults={"sliding_window": 4096, "num_key_value_heads": 8}
)

ARCHS = (LLAMA, MISTRAL)
