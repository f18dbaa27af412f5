"""Llama and Mistral: grouped-query attention, rotary halves, SiLU-gated feed-forward, RMS norms.

Follows conversion/llama.py of llama.cpp. Both spellings of rotary settings are read: rope_theta
with rope_scaling, and rope_parameters.
"""

from dataclasses import replace

from quant.checkpoint.config import Config
from quant.convert.archs import blocks
from quant.convert.archs.base import Arch, Key, Shapes


def check(config: Config) -> list[str]:
    """Raise UserError for settings that llama.cpp's llama computes differently; return notes for
    the user.
    """
    experts = (config.values.get("num_local_experts"), "it is a mixture of experts")
    blocks.refuse(config, [*blocks.problems(config, ropes=blocks.FACTORED), experts])
    return window(config)


def window(config: Config) -> list[str]:
    """Return a note if the model has a sliding window, which llama.cpp's llama ignores."""
    width = config.values.get("sliding_window")
    if isinstance(width, int) and width < config.number("max_position_embeddings"):
        return [
            f"this model attends to {width} positions, llama.cpp's llama to all: "
            "answers may differ in longer texts"
        ]
    return []


def keys(config: Config) -> list[Key]:
    """Return the common keys and the rotary width of a head, which is its whole width."""
    return [*blocks.keys(config), Key("rope.dimension_count", "uint32", blocks.heads(config)[2])]


def expected(config: Config) -> Shapes:
    """Return the required tensors with their shapes, rows first."""
    return blocks.ends(config) | blocks.blocks(
        config, blocks.attention(config), blocks.gated(config)
    )


def optional(config: Config) -> Shapes:
    """Return the shapes of biases that some finetunes have and llama.cpp loads if present."""
    hidden, ff = config.number("hidden_size"), config.number("intermediate_size")
    output_biases: Shapes = {
        "attn_output.bias": (hidden,),
        "ffn_gate.bias": (ff,),
        "ffn_up.bias": (ff,),
        "ffn_down.bias": (hidden,),
    }
    return blocks.blocks(config, blocks.biases(config), output_biases)


LLAMA = Arch(
    name="llama",
    kind="LLAMA",
    hf=("LlamaForCausalLM",),
    keys=keys,
    expected=expected,
    optional=optional,
    check=check,
    ops=blocks.INTERLEAVED,
    extra=blocks.rope_factors,
)

MISTRAL = replace(
    LLAMA, hf=("MistralForCausalLM",), defaults={"sliding_window": 4096, "num_key_value_heads": 8}
)

ARCHS = (LLAMA, MISTRAL)
