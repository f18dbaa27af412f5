"""Qwen3-MoE: Qwen3's attention, experts in every block, no shared expert.

Follows Qwen3MoeModel of llama.cpp (conversion/qwen.py, src/models/qwen3moe.cpp).
"""

from quant.archs import common, experts
from quant.archs.base import Arch, Config, Key, Shapes
from quant.archs.qwen2moe import dense


def check(config: Config) -> list[str]:
    """Raise UserError for settings that llama.cpp's qwen3moe computes differently: it always
    normalizes the experts' weights.
    """
    common.refuse(
        config,
        [
            *common.problems(config),
            *experts.problems(config),
            *dense(config),
            common.biased(config, "attention_bias"),
            (not config.flag("norm_topk_prob"), "norm_topk_prob is false"),
            (common.windowed(config, lambda *_: True), "its layers have a sliding window"),
        ],
    )
    return []


def keys(config: Config) -> list[Key]:
    """Return the common keys and the experts' keys."""
    width = config.number("moe_intermediate_size")
    return [
        *common.keys(config),
        *experts.keys(config),
        Key("expert_feed_forward_length", "uint32", width),
    ]


def expected(config: Config) -> Shapes:
    """Return the required tensors with their shapes, rows first."""
    return common.ends(config) | common.blocks(
        config,
        common.attention(config),
        common.head_norms(config),
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
