"""Phi 3, 3.5 and 4: query, key and value in one matrix, gate and up in another; long contexts by
rotary factors.

Follows conversion/phi.py and src/models/phi3.cpp of llama.cpp, which attends to everything whatever
the window, and takes the long factors where its context is larger than the original length.
"""

import math
from typing import TYPE_CHECKING

from quant.archs import common
from quant.archs.base import Arch, Config, Key, Shapes
from quant.errors import Refusal

if TYPE_CHECKING:
    from quant.native import F32

DEFAULTS = {
    "max_position_embeddings": 4096,
    "original_max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
}
LONG = ("longrope", "su")


def stretched(config: Config) -> Config | None:
    """The rotary settings where they have factors for long contexts."""
    settings = common.rope(config)
    return settings if settings.values["rope_type"] in LONG else None


def check(config: Config) -> list[str]:
    """Refuse what llama.cpp's phi3 would not compute alike; returns what the user should know."""
    count, _, head_dim = common.heads(config)
    hidden, length = config.number("hidden_size"), config.number("max_position_embeddings")
    original = config.number("original_max_position_embeddings")
    common.refuse(
        config,
        [
            *common.problems(config, ropes=("default", *LONG), partial=True),
            (
                count * head_dim != hidden,
                f"{count} heads of {head_dim} values are not its {hidden} values",
            ),
            (config.flag("attention_bias"), "its attention has biases"),
        ],
    )
    notes, window = [], config.values.get("sliding_window")
    if isinstance(window, int) and window < length:
        notes.append(
            f"this model attends to {window} positions; llama.cpp's phi3 to all: beyond them answers may differ"
        )
    if stretched(config):
        notes.append(
            f"this model turns positions by other factors in texts beyond {original} tokens; llama.cpp takes those "
            f"wherever its context is larger: use -c {original} for short texts"
        )
    return notes


def keys(config: Config) -> list[Key]:
    """The ordinary keys, how much of a head is rotary, and a window of 0 where there is none: it
    marks Phi 4.
    """
    window = config.values.get("sliding_window")
    return [
        *common.keys(config),
        Key("rope.dimension_count", "uint32", common.rotary(config)),
        Key(
            "attention.sliding_window",
            "uint32",
            0 if window is None else config.number("sliding_window"),
        ),
        *scaling(config),
    ]


def scaling(config: Config) -> list[Key]:
    """The original length, and what the factors for long contexts do to attention (LongRoPE)."""
    original = config.number("original_max_position_embeddings")
    found = [Key("rope.scaling.original_context_length", "uint32", original)]
    if settings := stretched(config):
        ratio = config.number("max_position_embeddings") / original
        ratio = settings.real("factor", ratio)
        usual = (
            math.sqrt(1 + math.log(ratio) / math.log(original))
            if ratio > 1 and original > 1
            else 1.0
        )
        found += [
            Key("rope.scaling.type", "string", "longrope"),
            Key("rope.scaling.attn_factor", "float32", settings.real("attention_factor", usual)),
        ]
    return found


def extra(config: Config) -> "dict[str, F32]":
    """The factors of every rotary pair for long and short contexts."""
    import numpy as np

    if not (settings := stretched(config)):
        return {}
    found = {}
    for kind in ("long", "short"):
        factors, count = settings.values.get(f"{kind}_factor"), common.rotary(config) // 2
        sound = isinstance(factors, list) and len(factors) == count
        if not sound or not all(
            type(value) in (int, float) and 0 < value < 1e30 for value in factors or ()
        ):
            raise Refusal(
                f"{config.where}: {kind}_factor should be {count} positive numbers",
                hint="fetch it again",
            )
        found[f"rope_factors_{kind}.weight"] = np.array(factors, np.float32)
    return found


def expected(config: Config) -> Shapes:
    """The tensors that must be there, with their shapes, rows first."""
    hidden, (count, kv_heads, head_dim) = config.number("hidden_size"), common.heads(config)
    wide, narrow = count * head_dim, kv_heads * head_dim
    attention: Shapes = {
        "attn_norm.weight": (hidden,),
        "attn_qkv.weight": (wide + 2 * narrow, hidden),
        "attn_output.weight": (hidden, wide),
    }
    return common.ends(config) | common.blocks(config, attention, common.fused(config))


PHI3 = Arch(
    name="phi3",
    kind="PHI3",
    hf=("Phi3ForCausalLM",),
    keys=keys,
    expected=expected,
    check=check,
    defaults=DEFAULTS,
    extra=extra,
)

ARCHS = (PHI3,)
