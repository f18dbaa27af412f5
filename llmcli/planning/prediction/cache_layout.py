"""The bytes of the KV cache and of recurrent states by layer, for the placement of layers on
devices.

Source of the sizes of states: llama_hparams::n_embd_r and n_embd_s in src/llama-hparams.cpp.
"""

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
    """Return the bytes of the layers of a model with recurrent states (Mamba), or None if it has
    states of another kind.
    """
    n_all = header.get_int("block_count") or 0
    n_layers = n_all - (header.get_int("nextn_predict_layers") or 0)
    sequence_bytes = _state_bytes(header)
    if n_layers <= 0 or not sequence_bytes:
        return None
    has_attention = _attention_layers(header, n_layers)
    if has_attention is None:
        return None
    n_states = 1 + (options.usable_rs_seq if header.architecture in ROLLBACK_ARCHS else 0)
    state_bytes = sequence_bytes * options.n_sequences * n_states
    attention = [0] * n_layers
    if any(has_attention):
        prefix = f"{header.architecture}."
        metadata = {
            key: value
            for key, value in header.metadata.items()
            if not key.startswith(tuple(prefix + name for name in kv_size.UNPREDICTED_KEYS))
        }
        shape = kv_size.read_shape(metadata)
        if shape is None:
            return None
        attention = [
            nbytes * has
            for nbytes, has in zip(_attention_bytes(shape, options), has_attention, strict=True)
        ]
    is_parallel = header.architecture in PARALLEL_ARCHS
    return tuple(
        nbytes + (0 if has and not is_parallel else state_bytes)
        for nbytes, has in zip(attention, has_attention, strict=True)
    )


def checkpoint_bytes(header: ModelHeader, options: ContextOptions) -> int | None:
    """Return about how many bytes a checkpoint of a sequence takes: the windows of its layers, or
    its recurrent state. Return 0 if the context takes none, and None if this is unknown.
    """
    if not options.unified or header.architecture in kv_size.CACHELESS_ARCHS:
        return 0
    shape = kv_size.read_shape(header.metadata)
    if shape is not None:
        if options.swa_full or not 0 < shape.window < options.n_ctx:
            return 0
        kinds = options.type_k, options.type_v
        sizes = zip(shape.k_values, shape.v_values, shape.is_windowed, strict=True)
        return shape.window * sum(
            kv_size.row_bytes(kinds[0], k) + kv_size.row_bytes(kinds[1], v)
            for k, v, is_windowed in sizes
            if is_windowed
        )
    n_layers = (header.get_int("block_count") or 0) - (header.get_int("nextn_predict_layers") or 0)
    has_attention = _attention_layers(header, n_layers)
    state_bytes = _state_bytes(header)
    if has_attention is None or not state_bytes:
        return None
    is_parallel = header.architecture in PARALLEL_ARCHS
    return state_bytes * (n_layers if is_parallel else has_attention.count(False))


def _state_bytes(header: ModelHeader) -> int:
    """Return the bytes of a sequence's state in a layer, or 0 for states of another kind."""
    inner, state, kernel, groups = (
        header.get_int(f"ssm.{name}") or 0
        for name in ("inner_size", "state_size", "conv_kernel", "group_count")
    )
    if not inner or not state:
        return 0
    return STATE_VALUE_BYTES * (state * inner + max(0, kernel - 1) * (inner + 2 * groups * state))


def _attention_layers(header: ModelHeader, n_layers: int) -> list[bool] | None:
    """Return for each layer of a hybrid whether it has attention, or None if this is unknown."""
    arch = header.architecture
    if arch in RECURRENT_ARCHS:
        return [False] * n_layers
    if arch in PARALLEL_ARCHS:
        return [True] * n_layers
    if interval := header.get_int("full_attention_interval") or ATTENTION_INTERVALS.get(arch):
        return [(layer + 1) % interval == 0 for layer in range(n_layers)]
    heads = header.metadata.get(f"{arch}.attention.head_count_kv")
    try:
        counts = kv_size.per_layer_numbers(heads, n_layers) if heads is not None else ()
    except (TypeError, ValueError, OverflowError):  # the metadata is not valid
        return None
    return [count > 0 for count in counts] if len(counts) == n_layers else None
