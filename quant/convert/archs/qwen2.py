"""Qwen2 and Qwen2.5: Llama with biases of query, key and value; rotary halves stay in place.

Follows Qwen2Model of llama.cpp (conversion/qwen.py, src/models/qwen2.cpp).
"""

from quant.checkpoint.config import Config
from quant.convert.archs import blocks
from quant.convert.archs.base import Arch, Shapes


def check(config: Config) -> list[str]:
    """Raise UserError for settings that llama.cpp's qwen2 computes differently."""
    blocks.refuse(config, [*blocks.problems(config), window(config), blocks.square(config)])
    return []


def window(config: Config) -> tuple[object, str]:
    """Return the problem of a sliding window on the last layers (Qwen2 and Qwen3)."""
    return blocks.windowed(
        config, lambda layer, first: layer >= first
    ), "some of its layers have a sliding window"


def expected(config: Config) -> Shapes:
    """Return the required tensors with their shapes, rows first."""
    return blocks.ends(config) | blocks.blocks(
        config, blocks.attention(config), blocks.biases(config), blocks.gated(config)
    )


QWEN2 = Arch(
    name="qwen2",
    kind="QWEN2",
    hf=("Qwen2ForCausalLM",),
    keys=blocks.keys,
    expected=expected,
    check=check,
    defaults={"sliding_window": 4096},
)

ARCHS = (QWEN2,)
