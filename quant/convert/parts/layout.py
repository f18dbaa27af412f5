"""The layout of a model as config.json describes it: how many layers and heads it has, and which
layers have a sliding window or another kind.
"""

from collections.abc import Callable, Sequence

from quant.checkpoint.config import CheckpointConfig
from quant.errors import UserError

MAX_LAYERS = 512  # llama.cpp, LLAMA_MAX_LAYERS


def layer_count(config: CheckpointConfig) -> int:
    """Return the number of layers (blocks).

    Raises UserError if llama.cpp does not allow so many. Therefore every list with an entry for
    each layer is short, whatever config.json says.
    """
    count = config.get_int("num_hidden_layers")
    if count > MAX_LAYERS:
        raise UserError(
            f"{config.location} cannot be converted: it has {count} layers; "
            f"llama.cpp allows {MAX_LAYERS}",
            hint="use a GGUF of this model",
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


def sliding_layers(config: CheckpointConfig, period: int) -> list[bool]:
    """Return a list with one entry for each layer: whether the layer attends only to a sliding
    window.

    The entries follow layer_types in the config. Without layer_types, all layers have a window
    except each `period`-th one. Raises UserError if layer_types is malformed.
    """
    if config.values.get("layer_types") is None:
        return [bool((layer + 1) % period) for layer in range(layer_count(config))]
    return layers_of_kind(config, "layer_types", ("sliding_attention",), ("full_attention",))


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
