"""What most model families share: head counts, rotary settings, common metadata keys, tensor
shapes, and checks of settings.

Follows TextModel.set_gguf_parameters of llama.cpp (conversion/base.py). Functions that return
"problems" return (condition, text) pairs: if a condition is true, the model cannot be converted,
and the text says why (see raise_problems).
"""

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from quant.checkpoint import tensor_views
from quant.checkpoint.config import CheckpointConfig
from quant.checkpoint.safetensors import Tensors
from quant.convert.archs.base import ArchKey, Shapes, TensorOp, rope_row_order
from quant.errors import UserError

if TYPE_CHECKING:
    from quant.native.ggml import F32

MAX_LAYERS = 512  # llama.cpp, LLAMA_MAX_LAYERS
ORIGINAL_LENGTH_KEY = "original_max_position_embeddings"
ROPE_TYPES = ("default", "linear", "yarn")
# for families whose graph in llama.cpp also reads rope_freqs.weight
ROPE_TYPES_WITH_FACTORS = (*ROPE_TYPES, "llama3")


def layer_count(config: CheckpointConfig) -> int:
    """Return the number of layers (blocks).

    Raises UserError if llama.cpp does not allow so many. Therefore every list with an entry for
    each layer is short, whatever config.json says.
    """
    count = config.get_int("num_hidden_layers")
    raise_problems(
        config, [(count > MAX_LAYERS, f"it has {count} layers; llama.cpp allows {MAX_LAYERS}")]
    )
    return count


def head_counts(config: CheckpointConfig) -> tuple[int, int, int]:
    """Return the numbers of query heads and of key-value heads, and the width of a head
    in values.
    """
    count = config.get_int("num_attention_heads")
    return (
        count,
        config.get_int("num_key_value_heads", default=count),
        config.get_int("head_dim", default=max(1, config.get_int("hidden_size") // count)),
    )


def rope_settings(config: CheckpointConfig, layer_type: str = "full_attention") -> CheckpointConfig:
    """Return the rotary settings (rope_type, rope_theta, factor, ...) as one config. config.json
    has them either in rope_scaling or in rope_parameters.

    If config.json has separate settings for each layer type, those of `layer_type` are returned. As
    in transformers, original_max_position_embeddings defaults to max_position_embeddings, and its
    value at the root of config.json takes precedence.
    """
    settings: dict[str, Any] = {
        "rope_theta": 10000.0,
        ORIGINAL_LENGTH_KEY: config.values.get("max_position_embeddings"),
    }
    for key in ("rope_theta", "partial_rotary_factor"):
        if (value := config.values.get(key)) is not None:
            settings[key] = value
    for key in ("rope_scaling", "rope_parameters"):
        value = config.values.get(key)
        if isinstance(value, dict) and layer_type in value:
            value = value[layer_type]
        if isinstance(value, dict):
            settings |= {name: item for name, item in value.items() if item is not None}
    if (value := config.values.get(ORIGINAL_LENGTH_KEY)) is not None:
        settings[ORIGINAL_LENGTH_KEY] = value
    settings["rope_type"] = settings.get("rope_type", settings.get("type", "default"))
    return CheckpointConfig(settings, config.location)


def rotary_width(config: CheckpointConfig) -> int:
    """Return how many values of a head are rotary: the head's width times partial_rotary_factor.

    Raises UserError unless this is an even number of at least two values.
    """
    head_dim, factor = (
        head_counts(config)[2],
        rope_settings(config).get_float("partial_rotary_factor", 1.0),
    )
    count = int(head_dim * factor)
    if factor > 1 or count < 2 or count % 2:
        raise UserError(
            f"{config.location}: partial_rotary_factor {factor} of {head_dim} values does not give "
            "whole rotary pairs",
            hint="fetch it again",
        )
    return count


def sliding_layers(config: CheckpointConfig, period: int) -> list[bool]:
    """Return a list with one entry for each layer: whether the layer attends only to a sliding
    window.

    The entries follow layer_types in the config. Without layer_types, all layers have a window
    except each `period`-th one. Raises UserError if layer_types is malformed.
    """
    if config.values.get("layer_types") is None:
        return [bool((layer + 1) % period) for layer in range(layer_count(config))]
    return layers_of_kind(config, "layer_types", ("sliding_attention",), ("full_attention",))


def sliding_window_keys(config: CheckpointConfig, layers: list[bool], period: int) -> list[ArchKey]:
    """Return the metadata keys of a sliding window. `layers` says for each layer whether it has the
    window.

    llama.cpp assumes that all layers of the family have a window except each `period`-th one. If
    `layers` differs from this pattern, a key with the pattern is added.
    """
    keys = [ArchKey("attention.sliding_window", "uint32", config.get_int("sliding_window"))]
    if layers != [bool((layer + 1) % period) for layer in range(len(layers))]:
        keys.append(ArchKey("attention.sliding_window_pattern", "array:bool", layers))
    return keys


def layers_of_kind(
    config: CheckpointConfig,
    setting: str,
    kinds: Sequence[str],
    other_kinds: Sequence[str],
    label: str = "",
) -> list[bool]:
    """Return a list with one entry for each layer: whether its type is one of `kinds`. Raises
    UserError unless the setting is a list with one of `kinds` or `other_kinds` for each layer.

    `label`: the name of the setting in the error, if config.json may have another one.
    """
    types, allowed = config.values.get(setting), (*kinds, *other_kinds)
    if (
        not isinstance(types, list)
        or len(types) != layer_count(config)
        or any(kind not in allowed for kind in types)
    ):
        raise UserError(
            f"{config.location}: the types of layers ({label or setting}) should be "
            f"{layer_count(config)} entries, each {' or '.join(allowed)}",
            hint="fetch it again",
        )
    return [kind in kinds for kind in types]


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
    rope_types: Sequence[str] = ROPE_TYPES,
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
      then reports with yarn_ramp_notes().
    """
    _, _, head_dim = head_counts(config)
    settings, activation = rope_settings(config), config.values.get(activation_key, activations[0])
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
            rope_type == "yarn" and _has_other_ramp(settings, allow_rounded_ramp),
            "its yarn settings beta_fast, beta_slow or truncate differ from llama.cpp's",
        ),
        (config.values.get("is_causal") is False, "it also attends to later positions"),
        (activation not in activations, f"its activation is {activation}"),
    ]


def common_keys(config: CheckpointConfig) -> list[ArchKey]:
    """Return the metadata keys of families with rotary heads and a gated feed-forward, in
    llama.cpp's order.
    """
    (count, kv_heads, head_dim), settings = head_counts(config), rope_settings(config)
    entries = [
        ArchKey("block_count", "uint32", layer_count(config)),
        ArchKey("context_length", "uint32", config.get_int("max_position_embeddings")),
        ArchKey("embedding_length", "uint32", config.get_int("hidden_size")),
        ArchKey("feed_forward_length", "uint32", config.get_int("intermediate_size")),
        ArchKey("attention.head_count", "uint32", count),
        ArchKey("attention.head_count_kv", "uint32", kv_heads),
        ArchKey("rope.freq_base", "float32", settings.get_float("rope_theta")),
        ArchKey(
            "attention.layer_norm_rms_epsilon", "float32", config.get_float("rms_norm_eps", 1e-6)
        ),
        ArchKey("vocab_size", "uint32", config.get_int("vocab_size")),
    ]
    if config.values.get("head_dim") is not None:
        entries += [
            ArchKey("attention.key_length", "uint32", head_dim),
            ArchKey("attention.value_length", "uint32", head_dim),
        ]
    return [*entries, *rope_scaling_keys(settings)]


def layer_norm_keys(config: CheckpointConfig, eps: float) -> list[ArchKey]:
    """Return the common metadata keys for a family whose norms also subtract the mean. `eps` is
    the number that is added to the variance.
    """
    entry = ArchKey("attention.layer_norm_epsilon", "float32", eps)
    return [
        entry if key.name == "attention.layer_norm_rms_epsilon" else key
        for key in common_keys(config)
    ]


def rope_scaling_keys(settings: CheckpointConfig) -> list[ArchKey]:
    """Return the metadata keys of linear or yarn rope scaling. For other rope types there are no
    keys.
    """
    if settings.values["rope_type"] == "linear":
        factor = settings.get_float("factor")
        return [
            ArchKey("rope.scaling.type", "string", "linear"),
            ArchKey("rope.scaling.factor", "float32", factor),
        ]
    if settings.values["rope_type"] == "yarn":
        return _yarn(settings)
    return []


def _yarn(settings: CheckpointConfig) -> list[ArchKey]:
    """Return the metadata keys of yarn scaling.

    llama.cpp itself multiplies sines and cosines by 1 + ln(factor) / 10 (rope_yarn in ggml-cpu).
    Therefore the key attn_factor is the checkpoint's attention factor divided by this number.
    """
    return [
        ArchKey("rope.scaling.type", "string", "yarn"),
        ArchKey("rope.scaling.factor", "float32", settings.get_float("factor")),
        ArchKey(
            "rope.scaling.original_context_length", "uint32", settings.get_int(ORIGINAL_LENGTH_KEY)
        ),
        ArchKey(
            "rope.scaling.attn_factor",
            "float32",
            yarn_attention_factor(settings) / yarn_scale(settings),
        ),
    ]


def yarn_scale(settings: CheckpointConfig, weight: float = 1.0) -> float:
    """Return 1 + weight * ln(factor) / 10. All of yarn's scaling factors have this form. `weight`
    is a setting such as mscale.
    """
    return 0.1 * weight * math.log(max(1.0, settings.get_float("factor"))) + 1


def yarn_attention_factor(settings: CheckpointConfig) -> float:
    """Return the factor by which transformers multiplies the sines and cosines of a yarn model
    (modeling_rope_utils).
    """
    if "attention_factor" in settings.values:
        return settings.get_float("attention_factor")
    if settings.values.get("mscale") and settings.values.get("mscale_all_dim"):
        return yarn_scale(settings, settings.get_float("mscale")) / yarn_scale(
            settings, settings.get_float("mscale_all_dim")
        )
    return yarn_scale(settings)


def _has_other_ramp(settings: CheckpointConfig, allow_rounded_ramp: bool) -> bool:
    """Return whether a yarn model's ramp, between scaled and unscaled dimensions, differs from
    llama.cpp's fixed ramp (beta_fast 32, beta_slow 1, truncated). With `allow_rounded_ramp`, the
    setting truncate is not compared.
    """
    values = settings.values
    truncated = allow_rounded_ramp or values.get("truncate", True)
    return (values.get("beta_fast") or 32, values.get("beta_slow") or 1, truncated) != (32, 1, True)


def yarn_ramp_notes(config: CheckpointConfig) -> list[str]:
    """Return a note if a yarn model does not round the ends of its ramp to whole dimensions.
    llama.cpp always rounds them.
    """
    settings = rope_settings(config).values
    if settings["rope_type"] != "yarn" or settings.get("truncate", True):
        return []
    return [
        "llama.cpp rounds the ends of this model's yarn ramp, and transformers does not: "
        "answers differ slightly"
    ]


def has_sliding_window(config: CheckpointConfig, is_sliding: Callable[[int, int], bool]) -> bool:
    """Return whether some layer attends only to a sliding window. If the config has layer_types,
    they decide, else the function `is_sliding` does.

    `is_sliding(layer, max_window_layers)` is called for each layer, because some families give the
    first layers a window and others the last layers.
    """
    if not config.get_bool("use_sliding_window") or config.values.get("sliding_window") in (
        None,
        0,
    ):
        return False
    if config.get_int("sliding_window") >= config.get_int("max_position_embeddings"):
        return False
    if isinstance(types := config.values.get("layer_types"), list):
        return "sliding_attention" in types
    bound = (
        0
        if config.values.get("max_window_layers") == 0
        else config.get_int("max_window_layers", default=28)
    )
    return any(is_sliding(layer, bound) for layer in range(layer_count(config)))


def problem_head_width(config: CheckpointConfig) -> tuple[object, str]:
    """Return the problem (condition, text) that the widths of all heads do not add up to
    hidden_size.
    """
    count, _, head_dim = head_counts(config)
    differs = count * head_dim != config.get_int("hidden_size")
    return differs, f"its heads have {head_dim} values, not hidden_size / heads"


def problem_uneven_heads(config: CheckpointConfig) -> tuple[object, str]:
    """Return the problem (condition, text) that not every key-value head has equally many query
    heads.
    """
    count, kv_heads, _ = head_counts(config)
    return count % kv_heads, f"{count} heads cannot share {kv_heads} key-value heads"


def problem_shared_keys(config: CheckpointConfig) -> tuple[object, str]:
    """Return the problem (condition, text) that several query heads share a key-value head."""
    count, kv_heads, _ = head_counts(config)
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


def embedding_and_head(config: CheckpointConfig) -> Shapes:
    """Return the shapes of the embedding, the norm after the last layer, and the head. A head that
    is tied to the embedding is left out.
    """
    hidden, vocab = config.get_int("hidden_size"), config.get_int("vocab_size")
    shapes: Shapes = {"token_embd.weight": (vocab, hidden), "output_norm.weight": (hidden,)}
    if not config.get_bool("tie_word_embeddings"):
        shapes["output.weight"] = (vocab, hidden)
    return shapes


def attention_shapes(config: CheckpointConfig) -> Shapes:
    """Return the shapes of one block's grouped-query attention and the norm before it, by role."""
    hidden, (count, kv_heads, head_dim) = config.get_int("hidden_size"), head_counts(config)
    query_width, kv_width = count * head_dim, kv_heads * head_dim
    return {
        "attn_norm.weight": (hidden,),
        "attn_q.weight": (query_width, hidden),
        "attn_k.weight": (kv_width, hidden),
        "attn_v.weight": (kv_width, hidden),
        "attn_output.weight": (hidden, query_width),
    }


def fused_attention_shapes(config: CheckpointConfig) -> Shapes:
    """Return the shapes of one block's attention, with queries, keys and values in one matrix, and
    the norm before it, by role.
    """
    hidden, (count, kv_heads, head_dim) = config.get_int("hidden_size"), head_counts(config)
    return {
        "attn_norm.weight": (hidden,),
        "attn_qkv.weight": ((count + 2 * kv_heads) * head_dim, hidden),
        "attn_output.weight": (hidden, count * head_dim),
    }


def qkv_bias_shapes(config: CheckpointConfig) -> Shapes:
    """Return the shapes of one block's biases of queries, keys and values, by role."""
    count, kv_heads, head_dim = head_counts(config)
    query_width, kv_width = count * head_dim, kv_heads * head_dim
    return {"attn_q.bias": (query_width,), "attn_k.bias": (kv_width,), "attn_v.bias": (kv_width,)}


def head_norm_shapes(config: CheckpointConfig) -> Shapes:
    """Return the shapes of one block's norms of each query head and each key head, by role."""
    head_dim = head_counts(config)[2]
    return {"attn_q_norm.weight": (head_dim,), "attn_k_norm.weight": (head_dim,)}


def separate_head_norm_shapes(config: CheckpointConfig) -> Shapes:
    """Return the shapes of one block's norms of query heads and key heads, by role, where each head
    has weights of its own.
    """
    count, kv_heads, head_dim = head_counts(config)
    return {"attn_q_norm.weight": (count, head_dim), "attn_k_norm.weight": (kv_heads, head_dim)}


def joint_head_norm_shapes(config: CheckpointConfig) -> Shapes:
    """Return the shapes of one block's norm over all query heads together and of that over all key
    heads together, by role.
    """
    count, kv_heads, head_dim = head_counts(config)
    return {"attn_q_norm.weight": (count * head_dim,), "attn_k_norm.weight": (kv_heads * head_dim,)}


def feed_forward_shapes(config: CheckpointConfig) -> Shapes:
    """Return the shapes of one block's gated feed-forward and the norm before it, by role."""
    hidden, ff = config.get_int("hidden_size"), config.get_int("intermediate_size")
    return {
        "ffn_norm.weight": (hidden,),
        "ffn_gate.weight": (ff, hidden),
        "ffn_up.weight": (ff, hidden),
        "ffn_down.weight": (hidden, ff),
    }


def plain_feed_forward_shapes(config: CheckpointConfig) -> Shapes:
    """Return the shapes of one block's feed-forward of two matrices, without a gate, and the norm
    before it, by role.
    """
    shapes = feed_forward_shapes(config)
    del shapes["ffn_gate.weight"]
    return shapes


def output_bias_shapes(config: CheckpointConfig) -> Shapes:
    """Return the shapes of the biases of one block's attention output and of its feed-forward
    without a gate, by role.
    """
    hidden, ff = config.get_int("hidden_size"), config.get_int("intermediate_size")
    return {"attn_output.bias": (hidden,), "ffn_up.bias": (ff,), "ffn_down.bias": (hidden,)}


def norm_bias_shapes(config: CheckpointConfig, *roles: str) -> Shapes:
    """Return the shapes of the biases of the norms `roles`, such as "attn_norm", by role."""
    return {f"{role}.bias": (config.get_int("hidden_size"),) for role in roles}


def fused_feed_forward_shapes(config: CheckpointConfig) -> Shapes:
    """Return the shapes of one block's gated feed-forward, with gate and up in one matrix, and the
    norm before it, by role.
    """
    hidden, ff = config.get_int("hidden_size"), config.get_int("intermediate_size")
    return {
        "ffn_norm.weight": (hidden,),
        "ffn_up.weight": (2 * ff, hidden),
        "ffn_down.weight": (hidden, ff),
    }


def post_norm_shapes(config: CheckpointConfig) -> Shapes:
    """Return the shapes of one block's norms after attention and after feed-forward, by role."""
    hidden = config.get_int("hidden_size")
    return {"post_attention_norm.weight": (hidden,), "post_ffw_norm.weight": (hidden,)}


def repeat_for_blocks(config: CheckpointConfig, *block_shapes: Shapes) -> Shapes:
    """Return the shapes of the tensors of all blocks by GGUF name ("blk.0.attn_q.weight"), given
    the shapes of one block's tensors by role ("attn_q.weight").
    """
    roles = {role: shape for shapes in block_shapes for role, shape in shapes.items()}
    return shapes_by_block(layer_count(config), lambda layer: roles)


def shapes_by_block(count: int, block_shapes: Callable[[int], Shapes]) -> Shapes:
    """Return the shapes of the tensors of `count` blocks by GGUF name. `block_shapes` returns the
    shapes of the tensors of the block with this number, by role.
    """
    return {
        f"blk.{layer}.{role}": shape
        for layer in range(count)
        for role, shape in block_shapes(layer).items()
    }


def rename_tensors(tensors: Tensors, new_name: Callable[[str], str | None]) -> Tensors:
    """Return the tensors under the names that `new_name` returns for their names, without those for
    which it returns None.

    A tensor whose new name is taken keeps its name, so that the converter reports it as unknown.
    """
    result: Tensors = {}
    for name, tensor in tensors.items():
        renamed = new_name(name)
        if renamed is not None:
            result[name if renamed in tensors or renamed in result else renamed] = tensor
    return result


def llama3_rope_factors(config: CheckpointConfig) -> "dict[str, F32]":
    """Return Llama 3's frequency factors as the tensor rope_freqs.weight `[head_dim / 2]`. For
    other rope types, return no tensors.

    Raises UserError if the settings contradict each other.
    """
    import numpy as np

    settings = rope_settings(config)
    if settings.values["rope_type"] != "llama3":
        return {}
    head_dim = head_counts(config)[2]
    factor, low, high = (
        settings.get_float("factor", 8.0),
        settings.get_float("low_freq_factor", 1.0),
        settings.get_float("high_freq_factor", 4.0),
    )
    original = settings.get_float(ORIGINAL_LENGTH_KEY)
    if low > high:
        raise UserError(
            f"{config.location}: low_freq_factor must not be above high_freq_factor",
            hint="fetch it again",
        )
    factors = []
    for pair in range(head_dim // 2):
        wavelength = 2 * math.pi * settings.get_float("rope_theta") ** (2 * pair / head_dim)
        if wavelength < original / high:
            factors.append(1.0)
        elif wavelength > original / low:
            factors.append(factor)
        else:
            # Llama 4 Scout has no factors between low and high, which are equal there
            smooth = (original / wavelength - low) / (high - low) if high > low else 1.0
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return {"rope_freqs.weight": np.array(factors, np.float32)}


# For families whose checkpoints store the two halves of a rotary head one after the other, but for
# which llama.cpp rotates interleaved pairs (llama_model_rope_type, src/llama-model.cpp). Biases are
# reordered like their weights.
INTERLEAVE_OPS: dict[str, TensorOp] = {
    "attn_q": lambda config, tensor: tensor_views.pick_rows(
        tensor, rope_row_order(head_counts(config)[0], head_counts(config)[2])
    ),
    "attn_k": lambda config, tensor: tensor_views.pick_rows(
        tensor, rope_row_order(head_counts(config)[1], head_counts(config)[2])
    ),
}
