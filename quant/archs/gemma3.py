"""Gemma 3, its text part: Gemma 2 with norms of queries and keys and two rotary bases, without caps
of attention.

Follows conversion/gemma.py and src/models/gemma3.cpp of llama.cpp. The settings of the global
layers stand in rope_theta and rope_scaling or in rope_parameters' full_attention, those of the
layers with a window in rope_local_base_freq or sliding_attention; the latter are never stretched.
"""

from typing import Any

from quant import views
from quant.archs import common, gemma2
from quant.archs.base import Arch, Config, Key, Shapes, Tensors

DEFAULTS = {  # of transformers' Gemma3TextConfig; it says vocab_size too, but see Arch.spare
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131072,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}
PERIOD = 6  # of the layers, the last of so many attends to everything
LARGE = 62  # layers of the 27B model, whose queries are scaled otherwise


def local(config: Config) -> Config:
    """The rotary settings of the layers with a window."""
    base, parts = config.values.get("rope_local_base_freq"), config.values.get("rope_parameters")
    part = parts.get("sliding_attention") if isinstance(parts, dict) else None
    values: dict[str, Any] = {"rope_theta": 10000.0 if base is None else base}
    return common.rope(Config(values | {"rope_parameters": part}, config.where))


def windowed(config: Config) -> list[bool]:
    """Which layers have a window."""
    return common.sliding(
        config, config.number("sliding_window_pattern", "_sliding_window_pattern", default=PERIOD)
    )


def check(config: Config) -> list[str]:
    """Refuse what llama.cpp's gemma3 would not compute alike."""
    parts, near = config.values.get("rope_parameters"), local(config).values
    flat = (
        isinstance(parts, dict)
        and bool(parts)
        and not parts.keys() & {"full_attention", "sliding_attention"}
    )
    common.refuse(
        config,
        [
            *gemma2.problems(config, LARGE),
            (config.values.get("attn_logit_softcapping") is not None, "its attention is capped"),
            (config.values["sliding_window"] is None, "its sliding_window is null"),
            (near["rope_type"] != "default", "its layers with a window have stretched positions"),
            (flat, "its rope_parameters do not tell global layers from those with a window"),
        ],
    )
    return []


def keys(config: Config) -> list[Key]:
    """The ordinary keys, the cap of the logits where there is one, the window and its rotary base."""
    found, layers = common.keys(config), windowed(config)
    if config.values.get("final_logit_softcapping") is not None:
        found.append(
            Key("final_logit_softcapping", "float32", config.real("final_logit_softcapping"))
        )
    if any(layers):
        found.append(Key("rope.freq_base_swa", "float32", local(config).real("rope_theta")))
        found += common.window(config, layers, PERIOD)
    return found


def expected(config: Config) -> Shapes:
    """The tensors that must be there, with their shapes, rows first."""
    head_dim = common.heads(config)[2]
    norms: Shapes = {"attn_q_norm.weight": (head_dim,), "attn_k_norm.weight": (head_dim,)}
    return gemma2.expected(config) | common.blocks(config, norms)


def prepare(config: Config, tensors: Tensors) -> Tensors:
    """Rows of the embedding and of the head without a token go: the tokenizer knows fewer than the
    class has rows.
    """
    size, found = config.number("vocab_size"), dict(tensors)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        if (tensor := tensors.get(name)) and len(tensor.shape) == 2 and tensor.shape[0] > size:
            found[name] = views.part(tensor, 0, size)
    return found


GEMMA3 = Arch(
    name="gemma3",
    kind="GEMMA3",
    hf=("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"),
    keys=keys,
    expected=expected,
    check=check,
    defaults=DEFAULTS,
    spare=True,
    prepare=prepare,
    ops=gemma2.SHIFTED,
)

ARCHS = (GEMMA3,)
