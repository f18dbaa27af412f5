"""Bytes of a KV cache, predicted from the file's header before anything is allocated.

Covers attention layers: MHA, GQA, MQA, sliding windows, compressed keys (MLA), K and V of any cache
type, one pool or a stream per sequence. The prediction is None where the cache follows other rules
(recurrent state, shared or indexed caches).

Source: src/llama-kv-cache.cpp, llama-kv-cache-iswa.cpp, load_swa_pattern and create_memory of
src/llama-model.cpp, the refusals of llama_init_from_model in src/llama-context.cpp.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from llmcli.errors import UserError
from quant.gguf.header import GgufArray

CELL_STEP = 256  # cells come in multiples of this
MAX_LAYERS = 512  # llama-hparams.h
BLOCK_VALUES = 32  # values in a block of every quantized cache type

# bytes of 32 values (ggml's block tables)
BYTES_PER_32 = {
    "f32": 128,
    "f16": 64,
    "bf16": 64,
    "q8_0": 34,
    "q5_1": 24,
    "q5_0": 22,
    "q4_1": 20,
    "q4_0": 18,
    "iq4_nl": 18,
}
FLOAT_TYPES = {"f32", "f16", "bf16"}

# Sliding-window layers of files that do not list them: every n-th layer is dense, counted from the
# end of the period, or from its start if the flag is set (src/models/*.cpp, load_swa_pattern).
WINDOW_PERIODS = {
    "gemma2": (2, False),
    "gemma3": (6, False),
    "cohere2": (4, False),
    "exaone4": (4, False),
    "gpt-oss": (2, False),
    "olmo2": (4, False),
    "smallthinker": (4, True),
    "plamo3": (8, False),
    "afmoe": (4, False),
}
# Models with a default window size, and models that keep a window even when its size is 0.
ALWAYS_WINDOWED = {"gemma2": 4096, "gpt-oss": 0}
# Models that attend to all tokens: llama.cpp disables the window of phi3 and reads none for the
# others.
WINDOW_IGNORED_ARCHS = {
    "phi3",
    "llama",
    "mistral3",
    "qwen2",
    "qwen2moe",
    "qwen3",
    "qwen3moe",
    "glm4",
    "granite",
    "granitemoe",
    "deepseek2",
    "smollm3",
}
# If the file has `key_length_mla`, only compressed keys are stored, and values are computed from
# them.
LATENT_ARCHS = {"deepseek2"}
# Models without a cache: embedding models and models that write by diffusion (create_memory).
CACHELESS_ARCHS = {
    "bert",
    "jina-bert-v2",
    "jina-bert-v3",
    "nomic-bert",
    "nomic-bert-moe",
    "neo-bert",
    "eurobert",
    "modern-bert",
    "gemma-embedding",
    "wavtokenizer-dec",
    "dream",
    "llada",
    "llada-moe",
    "rnd1",
}
UNPREDICTED_KEYS = (
    "ssm.",
    "wkv.",
    "attention.shared_kv_layers",
    "attention.indexer.",
    "shortconv.",
)


@dataclass(frozen=True, slots=True)
class LayerKV:
    """A layer's number of cells over all streams, and the bytes of its keys and values."""

    layer: int
    cells: int
    k_bytes: int
    v_bytes: int


@dataclass(frozen=True, slots=True)
class CacheShape:
    """The properties of a model that determine the size of its cache. Tuples have one entry per
    layer.

    `widest_v`: the largest entry that `v_values` would have if the layers of a prediction head were
    included. `is_latent`: only keys are stored, and K and V have the same type.
    """

    k_values: tuple[int, ...]  # values per cell
    v_values: tuple[int, ...]  # values per cell, zeros if latent
    window: int  # tokens of the sliding window; 0 for none
    is_windowed: tuple[bool, ...]
    k_heads: tuple[int, ...]  # values of one head
    v_heads: tuple[int, ...]
    widest_v: int
    is_latent: bool = False


@dataclass(frozen=True, slots=True)
class KVCache:
    """A predicted cache. `cells`: the cells of a layer without a sliding window. `bytes_per_token`:
    the bytes of one cell in every layer.
    """

    layers: tuple[LayerKV, ...]
    cells: int
    bytes_per_token: int

    @property
    def nbytes(self) -> int:
        """Return the bytes of the whole cache."""
        return sum(layer.k_bytes + layer.v_bytes for layer in self.layers)


def read_shape(metadata: Mapping[str, Any]) -> CacheShape | None:
    """Read the cache shape from GGUF metadata. Return None when the cache follows other rules or
    the metadata is not valid.
    """
    try:
        return _shape(metadata)
    except (TypeError, ValueError):  # a string instead of a number, or a list that is too short
        return None


@dataclass(frozen=True, slots=True)
class _Attention:
    """The attention settings of a header. Tuples have one entry per layer, with the layers of
    prediction heads at the end.
    """

    n_layers: int  # number of layers without those of prediction heads
    kv_heads: tuple[int, ...]
    k_size: int  # values of a key, per head
    v_size: int
    windowed_k_size: int  # the same for layers with a sliding window
    windowed_v_size: int
    window: int
    is_windowed: tuple[bool, ...]  # without the layers of prediction heads


def _shape(metadata: Mapping[str, Any]) -> CacheShape | None:
    arch = str(metadata.get("general.architecture", ""))
    if arch in CACHELESS_ARCHS or any(
        key.startswith(f"{arch}.{suffix}") for key in metadata for suffix in UNPREDICTED_KEYS
    ):
        return None
    attention = _read_attention(arch, metadata)
    if attention is None:
        return None
    if arch in LATENT_ARCHS and _number(arch, metadata, "attention.key_length_mla"):
        return _latent_shape(attention)
    if arch not in LATENT_ARCHS and _number(arch, metadata, "attention.kv_lora_rank"):
        return None
    return _grouped_shape(attention)


def _read_attention(arch: str, metadata: Mapping[str, Any]) -> _Attention | None:
    """Read the sizes of attention. Return None when they are not valid."""
    n_all = _number(arch, metadata, "block_count")
    n_layers = n_all - _number(arch, metadata, "nextn_predict_layers")
    if not 0 < n_layers <= n_all <= MAX_LAYERS:
        return None
    heads = _per_layer(metadata.get(f"{arch}.attention.head_count", 0), n_all)
    kv_heads = _per_layer(metadata.get(f"{arch}.attention.head_count_kv", list(heads)), n_all)
    if not heads or not heads[0] or len(kv_heads) != n_all:
        return None
    window = 0
    if arch not in WINDOW_IGNORED_ARCHS:
        default_window = ALWAYS_WINDOWED.get(arch, 0)
        window = _number(arch, metadata, "attention.sliding_window", default_window)
    is_windowed = _windowed(arch, metadata, n_layers, window)
    if is_windowed is None:
        return None
    head_size = _number(arch, metadata, "embedding_length") // heads[0]
    k_size = _number(arch, metadata, "attention.key_length", head_size)
    v_size = _number(arch, metadata, "attention.value_length", head_size)
    return _Attention(
        n_layers=n_layers,
        kv_heads=kv_heads,
        k_size=k_size,
        v_size=v_size,
        windowed_k_size=_number(arch, metadata, "attention.key_length_swa", k_size),
        windowed_v_size=_number(arch, metadata, "attention.value_length_swa", v_size),
        window=window,
        is_windowed=is_windowed,
    )


def _grouped_shape(attention: _Attention) -> CacheShape:
    """Return the shape of MHA, GQA and MQA: keys and values of every KV head."""
    k_heads, v_heads = _head_sizes(attention)
    n_layers, n_extra = attention.n_layers, len(attention.kv_heads) - attention.n_layers
    v_sizes = (*v_heads, *(attention.v_size,) * n_extra)
    v_values = [n * size for n, size in zip(attention.kv_heads, v_sizes, strict=True)]
    return CacheShape(
        k_values=_k_values(attention, k_heads),
        v_values=tuple(v_values[:n_layers]),
        window=attention.window,
        is_windowed=attention.is_windowed,
        k_heads=k_heads,
        v_heads=v_heads,
        widest_v=max(v_values),
    )


def _latent_shape(attention: _Attention) -> CacheShape:
    """Return the shape of MLA: only compressed keys are stored."""
    k_heads, v_heads = _head_sizes(attention)
    return CacheShape(
        k_values=_k_values(attention, k_heads),
        v_values=(0,) * attention.n_layers,
        window=attention.window,
        is_windowed=attention.is_windowed,
        k_heads=k_heads,
        v_heads=v_heads,
        widest_v=0,
        is_latent=True,
    )


def _k_values(attention: _Attention, k_heads: tuple[int, ...]) -> tuple[int, ...]:
    kv_heads = attention.kv_heads[: attention.n_layers]
    return tuple(n * size for n, size in zip(kv_heads, k_heads, strict=True))


def _head_sizes(attention: _Attention) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return for each layer the number of values of a key and of a value, per head."""
    return (
        tuple(
            attention.windowed_k_size if windowed else attention.k_size
            for windowed in attention.is_windowed
        ),
        tuple(
            attention.windowed_v_size if windowed else attention.v_size
            for windowed in attention.is_windowed
        ),
    )


def _number(arch: str, metadata: Mapping[str, Any], key: str, default: int = 0) -> int:
    return int(metadata.get(f"{arch}.{key}", default))


def without_windows(shape: CacheShape) -> CacheShape:
    """Return the shape of the same model for a cache in which sliding windows keep every cell
    (llama.cpp's swa_full).
    """
    return replace(shape, window=0, is_windowed=(False,) * len(shape.is_windowed))


def predict_cache(
    shape: CacheShape,
    n_ctx: int,
    type_k: str,
    type_v: str,
    *,
    n_ubatch: int,
    n_seq_max: int = 1,
    flash: bool = True,
    unified: bool = True,
) -> KVCache:
    """Return the cache of a context of `n_ctx` tokens: one pool, or without `unified` a stream of
    cells for each sequence.

    Without flash attention V is stored transposed, and every layer gets the width of the widest
    layer. When llama.cpp decides about flash attention, a quantized V turns it on.
    """
    cells, streams = round_up_cells(n_ctx), 1
    if not unified:
        cells, streams = round_up_cells(cells // n_seq_max), n_seq_max
    # llama.cpp computes this in 32 bits, and a header may contain a window of any size.
    window_cells = (shape.window * (n_seq_max if unified else 1) + min(n_ubatch, n_ctx)) % 2**32
    windowed_cells = round_up_cells(min(cells, window_cells))
    layers = []
    for index, (k, v, windowed) in enumerate(
        zip(shape.k_values, shape.v_values, shape.is_windowed, strict=True)
    ):
        layer_cells = (windowed_cells if windowed else cells) * streams
        v_row = row_bytes(type_v, v if flash else shape.widest_v)
        layers.append(
            LayerKV(index, layer_cells, layer_cells * row_bytes(type_k, k), layer_cells * v_row)
        )
    per_token = sum(row_bytes(type_k, k) for k in shape.k_values)
    per_token += sum(row_bytes(type_v, v if flash else shape.widest_v) for v in shape.v_values)
    return KVCache(tuple(layers), cells * streams, per_token)


def find_refusal(shape: CacheShape, type_k: str, type_v: str) -> tuple[str, str] | None:
    """Return why llama.cpp cannot use this cache, and a hint. Return None if it can.

    Two cases are refused here although llama.cpp accepts them: a quantized K without flash
    attention when the size of a head is not a multiple of BLOCK_VALUES, for which llama.cpp
    computes wrong results, and a window that no layer uses, at which it aborts.
    """
    if shape.window and not any(shape.is_windowed):
        return (
            f"this file has a sliding window of {shape.window} tokens but no layer that uses it: "
            "llama.cpp cannot run it",
            "convert the model again from its checkpoint",
        )
    if shape.is_latent and type_k != type_v:
        return (
            "this model stores compressed keys and computes values from them: "
            f"K is {type_k}, so V must not be {type_v}",
            f"use the same type for both: -ctk {type_k} -ctv {type_k}",
        )
    for what, flag, kind, heads in (
        ("K", "-ctk", type_k, shape.k_heads),
        ("V", "-ctv", type_v, shape.v_heads),
    ):
        odd = next((size for size in heads if size % BLOCK_VALUES), None)
        if kind not in FLOAT_TYPES and odd is not None:
            return (
                f"{kind} stores {what} in blocks of {BLOCK_VALUES} values, "
                f"but this model's heads have {odd} values",
                f"use {flag} f16, bf16 or f32",
            )
    return None


def check_cache(
    metadata: Mapping[str, Any], type_k: str, type_v: str, *, reproducible: bool = False
) -> None:
    """Raise UserError when llama.cpp would refuse these cache types for this file. Called before
    the file is loaded. `reproducible`: the types were chosen by the reproducible mode, so the hint
    suggests no other types.
    """
    form = read_shape(metadata)
    if form and (reason := find_refusal(form, type_k, type_v)):
        raise UserError(
            reason[0], hint="leave out --reproducible for this model" if reproducible else reason[1]
        )


def row_bytes(kind: str, values: int) -> int:
    """Return the bytes of `values` numbers of the cache type `kind`."""
    return values * BYTES_PER_32[kind] // BLOCK_VALUES


def _windowed(
    arch: str, metadata: Mapping[str, Any], layers: int, window: int
) -> tuple[bool, ...] | None:
    if not window and arch not in ALWAYS_WINDOWED:
        return (False,) * layers
    pattern = metadata.get(f"{arch}.attention.sliding_window_pattern")
    if pattern is not None and not isinstance(pattern, int):
        flags = [bool(flag) for flag in _list(pattern)[:layers]]
        return (*flags, *(False,) * (layers - len(flags)))
    if arch not in WINDOW_PERIODS:
        return None
    period, dense_first = WINDOW_PERIODS[arch]
    period = period if pattern is None else int(pattern)
    if period == 0:
        return (True,) * layers
    return tuple(
        bool(i % period) if dense_first else i % period < period - 1 for i in range(layers)
    )


def _per_layer(value: Any, layers: int) -> tuple[int, ...]:
    return (
        (int(value),) * layers
        if isinstance(value, int)
        else tuple(int(entry) for entry in _list(value)[:layers])
    )


def _list(value: Any) -> list[Any]:
    return list(value.read_values() if isinstance(value, GgufArray) else value)


def round_up_cells(cells: int) -> int:
    """Return the cells that llama.cpp allocates: the next multiple of 256."""
    return -(-cells // CELL_STEP) * CELL_STEP
