"""The bytes of the KV cache and of recurrent states by layer, for the placement of layers on
devices.

Source of the sizes of states: llama_hparams::n_embd_r and n_embd_s in src/llama-hparams.cpp. Source
of the kinds of layers: load_arch_hparams in src/models/*.cpp and create_memory in src/llama-model.cpp.
"""

from dataclasses import dataclass

from llmcli.runtime import kv_size
from llmcli.runtime.binding.contexts.context_options import ContextOptions
from quant.model_file.model_header import ModelHeader

STATE_VALUE_BYTES = 4  # states are 32-bit floats
# Of every n layers, the last has attention and the others have recurrent state
# (load_arch_hparams in src/models/*.cpp).
ATTENTION_INTERVALS = {"qwen3next": 4, "qwen35": 4, "qwen35moe": 4}
# Architectures whose layers all have recurrent state; those of the second set also have attention.
RECURRENT_ARCHS = {"mamba", "mamba2"}
PARALLEL_ARCHS = {"falcon-h1"}
# Architectures with layers that have neither (only feed-forward).
MLP_LAYER_ARCHS = {"nemotron_h", "nemotron_h_moe"}
# Architectures whose recurrent state can go back by `n_rs_seq` tokens, for which they keep as many
# states more (llm_arch_supports_rs_rollback in src/llama-arch.cpp).
ROLLBACK_ARCHS = {
    "kimi-k3",
    "qwen35",
    "qwen35moe",
    "qwen4exp",
    "deepseek4",
    "glm5-next",
    "nemotron_h",
    "nemotron_h_moe",
    "lfm2",
    "lfm2moe",
    "bailingmoe3",
}
# Bytes that llama.cpp writes beside the values of a partial state: at its start, for each layer and
# for each cell (state_write in src/llama-memory-recurrent.cpp and src/llama-kv-cache.cpp).
RECURRENT_HEADER_BYTES, WINDOW_HEADER_BYTES = 28, 24
LAYER_HEADER_BYTES, CELL_HEADER_BYTES = 24, 12


@dataclass(frozen=True, slots=True)
class _LayerKinds:
    """What each layer of a hybrid has, without the layers that predict further tokens."""

    has_attention: tuple[bool, ...]
    is_recurrent: tuple[bool, ...]


def cache_bytes_by_layer(header: ModelHeader, options: ContextOptions) -> tuple[int, ...] | None:
    """Return the bytes that each layer stores for a context; 0 for the layers that predict further
    tokens, which come last. None: unknown for this model.
    """
    shape = kv_size.read_shape(header.metadata)
    by_layer = _hybrid_bytes(header, options) if shape is None else _attention_bytes(shape, options)
    if by_layer is None:
        return None
    return (*by_layer, *(0,) * ((header.get_int("block_count") or 0) - len(by_layer)))


def predict_attention_cache(shape: kv_size.CacheShape, options: ContextOptions) -> kv_size.KVCache:
    """Return the size of the KV cache of a context, layer by layer."""
    return kv_size.predict_cache(
        kv_size.without_windows(shape) if options.swa_full else shape,
        options.n_ctx,
        options.type_k,
        options.type_v,
        n_ubatch=options.n_ubatch,
        n_seq_max=options.n_sequences,
        flash=options.flash_attn != "off",
        unified=options.unified,
    )


def _attention_bytes(shape: kv_size.CacheShape, options: ContextOptions) -> tuple[int, ...]:
    """Return the bytes of the keys and values of each layer."""
    cache = predict_attention_cache(shape, options)
    return tuple(layer.k_bytes + layer.v_bytes for layer in cache.layers)


def _hybrid_bytes(header: ModelHeader, options: ContextOptions) -> tuple[int, ...] | None:
    """Return the bytes of the layers of a model with recurrent states, or None if it has states of
    an unknown kind.
    """
    sequence_bytes, kinds = _state_bytes(header), _layer_kinds(header)
    if not sequence_bytes or kinds is None:
        return None
    n_states = 1 + (options.usable_rs_seq if header.architecture in ROLLBACK_ARCHS else 0)
    state_bytes = sequence_bytes * options.n_sequences * n_states
    attention = (0,) * len(kinds.has_attention)
    if any(kinds.has_attention):
        prefix = f"{header.architecture}."
        metadata = {
            key: value
            for key, value in header.metadata.items()
            if not key.startswith(tuple(prefix + name for name in kv_size.UNPREDICTED_KEYS))
        }
        shape = kv_size.read_shape(metadata)
        if shape is None:
            return None
        attention = _attention_bytes(shape, options)
    return tuple(
        nbytes * has + state_bytes * is_recurrent
        for nbytes, has, is_recurrent in zip(
            attention, kinds.has_attention, kinds.is_recurrent, strict=True
        )
    )


def checkpoint_bytes(header: ModelHeader, options: ContextOptions) -> int | None:
    """Return the bytes of a checkpoint of a sequence: the windows of its layers, if it is at least
    as long as a window, or its recurrent state. Return 0 if the context takes none, and None if this
    is unknown.
    """
    if not options.unified or header.architecture in kv_size.CACHELESS_ARCHS:
        return 0
    shape = kv_size.read_shape(header.metadata)
    if shape is not None:
        return _window_bytes(shape, options)
    state_bytes, kinds = _state_bytes(header), _layer_kinds(header)
    # a checkpoint of a hybrid with a window has both parts
    if not state_bytes or kinds is None or header.get_int("attention.sliding_window"):
        return None
    return RECURRENT_HEADER_BYTES + sum(kinds.is_recurrent) * (LAYER_HEADER_BYTES + state_bytes)


def _window_bytes(shape: kv_size.CacheShape, options: ContextOptions) -> int:
    """Return the bytes of a checkpoint of the layers with a sliding window; 0 if it takes none."""
    if options.swa_full or not 0 < shape.window < options.n_ctx:
        return 0
    sizes = [
        kv_size.row_bytes(options.type_k, k) + kv_size.row_bytes(options.type_v, v)
        for k, v, is_windowed in zip(shape.k_values, shape.v_values, shape.is_windowed, strict=True)
        if is_windowed
    ]
    cell_bytes = CELL_HEADER_BYTES + sum(sizes)
    return WINDOW_HEADER_BYTES + LAYER_HEADER_BYTES * len(sizes) + shape.window * cell_bytes


def _state_bytes(header: ModelHeader) -> int:
    """Return the bytes of a sequence's state in a layer, or 0 for states of an unknown kind."""
    if cache_length := header.get_int("shortconv.l_cache"):
        width = header.get_int("embedding_length") or 0
        return STATE_VALUE_BYTES * max(0, cache_length - 1) * width
    inner, state, kernel, groups = (
        header.get_int(f"ssm.{name}") or 0
        for name in ("inner_size", "state_size", "conv_kernel", "group_count")
    )
    if not inner or not state:
        return 0
    return STATE_VALUE_BYTES * (state * inner + max(0, kernel - 1) * (inner + 2 * groups * state))


def _layer_kinds(header: ModelHeader) -> _LayerKinds | None:
    """Return what the layers of a hybrid have, or None if this is unknown."""
    arch = header.architecture
    n_layers = (header.get_int("block_count") or 0) - (header.get_int("nextn_predict_layers") or 0)
    if n_layers <= 0:
        return None
    none, all_layers = (False,) * n_layers, (True,) * n_layers
    if arch in RECURRENT_ARCHS:
        return _LayerKinds(none, all_layers)
    if arch in PARALLEL_ARCHS:
        return _LayerKinds(all_layers, all_layers)
    listed = _layer_numbers(header, "attention.recurrent_layers", n_layers)
    interval = header.get_int("full_attention_interval") or ATTENTION_INTERVALS.get(arch)
    if listed is not None:
        has_attention = tuple(not number for number in listed)
    elif interval:
        has_attention = tuple((layer + 1) % interval == 0 for layer in range(n_layers))
    else:
        kv_heads = _layer_numbers(header, "attention.head_count_kv", n_layers)
        if kv_heads is None:
            return None
        has_attention = tuple(count > 0 for count in kv_heads)
    if arch not in MLP_LAYER_ARCHS:
        return _LayerKinds(has_attention, tuple(not has for has in has_attention))
    widths = _layer_numbers(header, "feed_forward_length", n_layers)
    if widths is None:
        return None
    return _LayerKinds(
        tuple(has and not width for has, width in zip(has_attention, widths, strict=True)),
        tuple(not has and not width for has, width in zip(has_attention, widths, strict=True)),
    )


def _layer_numbers(header: ModelHeader, key: str, n_layers: int) -> tuple[int, ...] | None:
    """Return a metadata value of the architecture as one integer for each layer. Return None if it
    is missing or not valid.
    """
    value = header.metadata.get(f"{header.architecture}.{key}")
    try:
        numbers = () if value is None else kv_size.per_layer_numbers(value, n_layers)
    except (TypeError, ValueError, OverflowError):
        return None
    return numbers if len(numbers) == n_layers else None
