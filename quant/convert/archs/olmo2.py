"""OLMo 2: norms only after attention and feed-forward, and norms over all query heads and all key
heads.

Follows Olmo2Model of llama.cpp (conversion/olmo.py, src/models/olmo2.cpp).
"""

from quant.checkpoint.config import Config
from quant.convert.archs import blocks
from quant.convert.archs.base import Arch, Shapes


def check(config: Config) -> list[str]:
    """Raise UserError for settings that llama.cpp's olmo2 computes differently."""
    blocks.refuse(
        config,
        [
            *blocks.problems(config),
            blocks.square(config),
            blocks.biased(config, "attention_bias"),
            (config.values.get("clip_qkv"), "its attention is clipped (clip_qkv)"),
        ],
    )
    return []


def expected(config: Config) -> Shapes:
    """Return the required tensors with their shapes, rows first."""
    hidden, (count, kv_heads, head_dim) = config.number("hidden_size"), blocks.heads(config)
    norms: Shapes = {
        "attn_q_norm.weight": (count * head_dim,),
        "attn_k_norm.weight": (kv_heads * head_dim,),
        "post_attention_norm.weight": (hidden,),
        "post_ffw_norm.weight": (hidden,),
    }
    block = blocks.attention(config) | blocks.gated(config) | norms
    absent = ("attn_norm.weight", "ffn_norm.weight")
    return blocks.ends(config) | blocks.blocks(
        config, {role: shape for role, shape in block.items() if role not in absent}
    )


OLMO2 = Arch(
    name="olmo2",
    kind="OLMO2",
    hf=("Olmo2ForCausalLM",),
    keys=blocks.keys,
    expected=expected,
    check=check,
    defaults={"rms_norm_eps": 1e-5},
    needs_head=True,
)

ARCHS = (OLMO2,)
