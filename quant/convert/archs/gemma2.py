"""Gemma 2: norms around attention and feed-forward, soft caps on attention scores and logits, and a
sliding window on every other layer.

Follows conversion/gemma.py and src/models/gemma2.cpp of llama.cpp, which always caps, ties the head
to the embedding, and derives the scale of the queries itself.
"""

from quant.checkpoint import tensor_views
from quant.checkpoint.config import Config
from quant.convert.archs import blocks
from quant.convert.archs.base import Arch, Key, Op, Shapes

DEFAULTS = {  # defaults of transformers' Gemma2Config
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "final_logit_softcapping": 30.0,
    "attn_logit_softcapping": 50.0,
}
PERIOD = 2  # layers; the last layer of each period attends to all positions
LARGE = 46  # layers of the 27B model, which scales queries differently


def scalar(config: Config, large: int) -> int:
    """Return the query_pre_attn_scalar that llama.cpp computes with. It recognizes the largest
    model by its layer count.
    """
    heads, _, head_dim = blocks.heads(config)
    return config.number("hidden_size") // heads if blocks.layers(config) == large else head_dim


def problems(config: Config, large: int) -> list[tuple[object, str]]:
    """Return (condition, text) pairs for settings that llama.cpp computes differently for Gemma 2
    and 3.
    """
    scalar_setting, computed = config.values["query_pre_attn_scalar"], scalar(config, large)
    return [
        *blocks.problems(
            config,
            ropes=("default", "linear"),
            acts=("gelu_pytorch_tanh",),
            act="hidden_activation",
        ),
        (
            scalar_setting != computed,
            f"its query_pre_attn_scalar is {scalar_setting}; llama.cpp computes with {computed}",
        ),
        (config.flag("attention_bias"), "its attention has biases"),
        (config.flag("use_bidirectional_attention"), "it attends to later tokens"),
    ]


def check(config: Config) -> list[str]:
    """Raise UserError for settings that llama.cpp's gemma2 computes differently."""
    missing = [
        (config.values[key] is None, f"its {key} is null")
        for key in ("attn_logit_softcapping", "final_logit_softcapping", "sliding_window")
    ]
    tied = config.flag("tie_word_embeddings")
    blocks.refuse(
        config,
        [*problems(config, LARGE), *missing, (not tied, "its head is not tied to the embedding")],
    )
    return []


def keys(config: Config) -> list[Key]:
    """Return the common keys, both soft caps and the sliding window."""
    return [
        *blocks.keys(config),
        Key("attn_logit_softcapping", "float32", config.real("attn_logit_softcapping")),
        Key("final_logit_softcapping", "float32", config.real("final_logit_softcapping")),
        *blocks.window(config, blocks.sliding(config, PERIOD), PERIOD),
    ]


def expected(config: Config) -> Shapes:
    """Return the required tensors with their shapes, rows first."""
    parts = blocks.attention(config), blocks.gated(config), blocks.post_norms(config)
    return blocks.ends(config) | blocks.blocks(config, *parts)


NORMS = (
    "attn_norm",
    "attn_q_norm",
    "attn_k_norm",
    "post_attention_norm",
    "ffn_norm",
    "post_ffw_norm",
    "output_norm",
)
SHIFTED: dict[str, Op] = dict.fromkeys(NORMS, lambda config, tensor: tensor_views.plus_one(tensor))

GEMMA2 = Arch(
    name="gemma2",
    kind="GEMMA2",
    hf=("Gemma2ForCausalLM",),
    keys=keys,
    expected=expected,
    check=check,
    defaults=DEFAULTS,
    ops=SHIFTED,
)

ARCHS = (GEMMA2,)
