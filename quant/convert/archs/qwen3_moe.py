"""Qwen3-MoE: Qwen3's attention, experts in every block, no shared expert.

Follows Qwen3MoeModel of llama.cpp (conversion/qwen.py, src/models/qwen3moe.cpp).
"""

from quant.checkpoint.config import Config
from quant.convert.archs import blocks, experts
from quant.convert.archs.base import Arch, Key, Shapes
from quant.convert.archs.qwen2_moe import dense


def check(config: Config) -> list[str]:
    """Raise UserError for settings that llama.cpp's qwen3moe computes differently: it always
    normalizes the experts' weights.
    """
    blocks.refuse(
        config,
        [
            *blocks.problems(config),
            *experts.problems(config),
            *dense(config),
            blocks.biased(config, "attention_bias"),
            (not config.flag("norm_topk_prob"), "norm_topk_prob is false"),
            (blocks.windowed(config, lambda *_: True), "its layers have a sliding window"),
        ],
    )
    return []


def keys(config: Config) -> list[Key]:
    """Return the common keys and the experts' keys."""
    width = config.number("moe_intermediate_size")
    return [
        *blocks.keys(config),
        *experts.keys(config),
        Key("expert_feed_forward_length", "uint32", width),
    ]


def expected(config: Config) -> Shapes:
    """Return the required tensors with their shapes, rows first."""
    return blocks.ends(config) | blocks.blocks(
        config,
        blocks.attention(config),
        blocks.head_norms(config),
        {"ffn_norm.weight": (config.number("hidden_size"),)},
        experts.shapes(config, config.number("moe_intermediate_size")),
    )


QWEN3MOE = Arch(
    name="qwen3moe",
    kind="QWEN3MOE",
    hf=("Qwen3MoeForCausalLM",),
    keys=keys,
    expected=expected,
    check=check,
    prepare=experts.gather,
    defaults={"sliding_window": 4096, "num_experts_per_tok": 8, "num_experts": 128},
)

ARCHS = (QWEN3MOE,)
