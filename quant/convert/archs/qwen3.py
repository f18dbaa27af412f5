"""Qwen3: Qwen2 without its biases, with a norm of every query and key head, and heads of any width.

Follows Qwen3Model of llama.cpp (conversion/qwen.py, src/models/qwen3.cpp). Rerankers with another
head have another class name, so they are refused.
"""

from dataclasses import replace

from quant.checkpoint.config import Config
from quant.convert.archs import blocks
from quant.convert.archs.base import Shapes
from quant.convert.archs.qwen2 import QWEN2, window


def check(config: Config) -> list[str]:
    """Raise UserError for settings that llama.cpp's qwen3 computes differently: it adds no bias to
    the attention's output.
    """
    blocks.refuse(
        config, [*blocks.problems(config), window(config), blocks.biased(config, "attention_bias")]
    )
    return []


def expected(config: Config) -> Shapes:
    """Return the required tensors with their shapes, rows first."""
    return blocks.ends(config) | blocks.blocks(
        config, blocks.attention(config), blocks.head_norms(config), blocks.gated(config)
    )


QWEN3 = replace(
    QWEN2,
    name="qwen3",
    kind="QWEN3",
    hf=("Qwen3ForCausalLM",),
    expected=expected,
    check=check,
    defaults={"sliding_window": 4096, "head_dim": 128},
)

ARCHS = (QWEN3,)
