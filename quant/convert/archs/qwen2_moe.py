"""Qwen1.5-MoE and Qwen2-MoE: experts in every block, and one shared expert with its own gate.

Follows Qwen2MoeModel of llama.cpp (conversion/qwen.py, src/models/qwen2moe.cpp).
"""

from quant.checkpoint.config import Config
from quant.convert.archs import blocks, experts
from quant.convert.archs.base import Arch, Key, Shapes

DEFAULTS = {
    "sliding_window": 4096,
    "decoder_sparse_step": 1,
    "num_experts_per_tok": 4,
    "qkv_bias": True,
}


def check(config: Config) -> list[str]:
    """Raise UserError for settings that llama.cpp's qwen2moe computes differently: it never
    normalizes the experts' weights.
    """
    blocks.refuse(
        config,
        [
            *blocks.problems(config),
            *experts.problems(config),
            *dense(config),
            blocks.square(config),
            (config.flag("norm_topk_prob"), "norm_topk_prob is true"),
            (
                blocks.windowed(config, lambda layer, most: layer % 2 == 0 and layer < most),
                "some of its layers have a sliding window",
            ),
        ],
    )
    return []


def dense(config: Config) -> list[tuple[object, str]]:
    """Return the problems of blocks without experts, which llama.cpp does not support."""
    return [
        (config.values.get("mlp_only_layers"), "the layers in mlp_only_layers have no experts"),
        (
            config.number("decoder_sparse_step", default=1) != 1,
            "decoder_sparse_step leaves blocks without experts",
        ),
    ]


def keys(config: Config) -> list[Key]:
    """Return the common keys and the experts' keys."""
    return [
        *blocks.keys(config),
        *experts.keys(config),
        Key("expert_feed_forward_length", "uint32", config.number("moe_intermediate_size")),
        Key(
            "expert_shared_feed_forward_length",
            "uint32",
            config.number("shared_expert_intermediate_size"),
        ),
    ]


def expected(config: Config) -> Shapes:
    """Return the required tensors with their shapes, rows first."""
    hidden, ff = config.number("hidden_size"), config.number("shared_expert_intermediate_size")
    shared: Shapes = {
        "ffn_norm.weight": (hidden,),
        "ffn_gate_inp_shexp.weight": (1, hidden),
        "ffn_gate_shexp.weight": (ff, hidden),
        "ffn_up_shexp.weight": (ff, hidden),
        "ffn_down_shexp.weight": (hidden, ff),
    }
    biases = blocks.biases(config) if config.flag("qkv_bias", True) else {}
    routed = experts.shapes(config, config.number("moe_intermediate_size"))
    return blocks.ends(config) | blocks.blocks(
        config, blocks.attention(config), biases, routed, shared
    )


QWEN2MOE = Arch(
    name="qwen2moe",
    kind="QWEN2MOE",
    hf=("Qwen2MoeForCausalLM",),
    keys=keys,
    expected=expected,
    check=check,
    prepare=experts.gather,
    defaults=DEFAULTS,
    needs_head=True,
)

ARCHS = (QWEN2MOE,)
