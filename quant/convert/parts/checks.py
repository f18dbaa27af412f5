"""Checks of settings that llama.cpp does not support or computes differently.

Functions that return "problems" return (condition, text) pairs: if a condition is true, the model
cannot be converted, and the text says why (see raise_problems). Notes are for the user, and the
model is converted.
"""

from collections.abc import Sequence

from quant.checkpoint.config import CheckpointConfig
from quant.convert.parts import layout, rope
from quant.errors import UserError


def raise_problems(config: CheckpointConfig, problems: Sequence[tuple[object, str]]) -> None:
    """Raise one UserError with the texts of all `problems` whose condition is true. Return if there
    are none.
    """
    reasons = [text for condition, text in problems if condition]
    if reasons:
        raise UserError(
            f"{config.location} cannot be converted: {'; '.join(reasons)}",
            hint="use a GGUF of this model",
        )


def common_problems(
    config: CheckpointConfig,
    *,
    rope_types: Sequence[str] = rope.ROPE_TYPES,
    activations: Sequence[str] = ("silu",),
    activation_key: str = "hidden_act",
    allow_partial_rotary: bool = False,
    allow_rounded_ramp: bool = False,
) -> list[tuple[object, str]]:
    """Return the problems of settings that llama.cpp does not support in families with rotary heads
    and a gated feed-forward.

    - `rope_types`: the rope types that llama.cpp supports for the family.
    - `activations`: the activations that llama.cpp supports for the family; `activation_key` is the
      setting that names the activation.
    - `allow_partial_rotary`: whether only a part of each head may be rotary.
    - `allow_rounded_ramp`: whether llama.cpp may round the ends of a yarn ramp, which the family
      then reports with rope.yarn_ramp_notes().
    """
    _, _, head_dim = layout.head_counts(config)
    settings, activation = (
        rope.rope_settings(config),
        config.values.get(activation_key, activations[0]),
    )
    rope_type, all_rotary = (
        settings.values["rope_type"],
        settings.values.get("partial_rotary_factor") in (None, 1),
    )
    return [
        problem_uneven_heads(config),
        (head_dim % 2, f"its heads have {head_dim} values: rotary halves need an even number"),
        (
            rope_type not in rope_types,
            f"its rope type is {rope_type!r}; supported are {', '.join(rope_types)}",
        ),
        (not allow_partial_rotary and not all_rotary, "only a part of each head is rotary"),
        ("mrope_section" in settings.values, "its rotary positions have sections (mrope)"),
        (
            rope_type == "yarn" and rope.has_other_ramp(settings, allow_rounded_ramp),
            "its yarn settings beta_fast, beta_slow or truncate differ from llama.cpp's",
        ),
        (config.values.get("is_causal") is False, "it also attends to later positions"),
        (activation not in activations, f"its activation is {activation}"),
    ]


def problem_head_width(config: CheckpointConfig) -> tuple[object, str]:
    """Return the problem (condition, text) that the widths of all heads do not add up to
    hidden_size.
    """
    count, _, head_dim = layout.head_counts(config)
    differs = count * head_dim != config.get_int("hidden_size")
    return differs, f"its heads have {head_dim} values, not hidden_size / heads"


def problem_uneven_heads(config: CheckpointConfig) -> tuple[object, str]:
    """Return the problem (condition, text) that not every key-value head has equally many query
    heads.
    """
    count, kv_heads, _ = layout.head_counts(config)
    return count % kv_heads, f"{count} heads cannot share {kv_heads} key-value heads"


def problem_shared_keys(config: CheckpointConfig) -> tuple[object, str]:
    """Return the problem (condition, text) that several query heads share a key-value head."""
    count, kv_heads, _ = layout.head_counts(config)
    return count != kv_heads, "its query heads share keys and values"


def problem_biases(config: CheckpointConfig, *settings: str) -> tuple[object, str]:
    """Return the problem (condition, text) that the model has biases that llama.cpp does not add.
    `settings` are the names of the flags in the config that say whether the model has such biases.
    """
    names = [name for name in settings if config.get_bool(name)]
    return names, f"it has biases that llama.cpp does not add ({' and '.join(names)})"


def problem_undivided_rope(config: CheckpointConfig) -> tuple[object, str]:
    """Return the problem (condition, text) that rope_parameters does not have separate settings for
    global layers and for sliding ones. Families with both kinds of layers need them.
    """
    parameters = config.values.get("rope_parameters")
    undivided = (
        isinstance(parameters, dict)
        and bool(parameters)
        and not parameters.keys() & {"full_attention", "sliding_attention"}
    )
    return undivided, "its rope_parameters do not distinguish global layers from sliding ones"


def window_notes(config: CheckpointConfig, architecture: str) -> list[str]:
    """Return a note if all layers have a sliding window, for a family of which llama.cpp ignores
    the window. `architecture` is llama.cpp's name of the family.
    """
    width = config.values.get("sliding_window")
    if not isinstance(width, int) or width >= config.get_int("max_position_embeddings"):
        return []
    return [
        f"this model attends to {width} positions, llama.cpp's {architecture} to all: "
        "answers may differ in longer texts"
    ]


def eps_notes(config: CheckpointConfig, norms: str, eps: float) -> list[str]:
    """Return a note if llama.cpp computes some norms with the eps of config.json, although
    transformers always uses `eps`. `norms` names these norms.
    """
    used = config.get_float("rms_norm_eps", eps)
    if used == eps:
        return []
    return [f"the norms of {norms} have eps {eps:g} in transformers and {used:g} in llama.cpp"]
