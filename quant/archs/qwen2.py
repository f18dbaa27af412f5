"""Qwen2 and Qwen2.5: llama with biases of query, key and value, its rotary halves left as they are.

Follows Qwen2Model of llama.cpp (conversion/qwen.py, src/models/qwen2.cpp).
"""

from quant.archs import common
from quant.archs.base import Arch, Config, Shapes


def check(config: Config) -> list[str]:
    """Refuse what llama.cpp's qwen2 would not compute alike."""
    common.refuse(config, [*common.problems(config), window(config), common.square(config)])
    return []


def window(config: Config) -> tuple[object, str]:
    """Qwen2's and Qwen3's last layers may attend to a window."""
    return common.windowed(
        config, lambda layer, first: layer >= first
    ), "some of its layers attend to a window only"


def expected(config: Config) -> Shapes:
    """The tensors that must be there, with their shapes, rows first."""
    return common.ends(config) | common.blocks(
        config, common.attention(config), common.biases(config), common.gated(config)
    )


QWEN2 = Arch(
    name="qwen2",
    kind="QWEN2",
    hf=("Qwen2ForCausalLM",),
    keys=common.keys,
    expected=expected,
    check=check,
    defaults={"sliding_window": 4096},
)

ARCHS = (QWEN2,)
