"""Predict the bytes of a KV cache from the header of a GGUF file, before anything is allocated, and
whether llama.cpp would refuse the cache types.

The prediction covers MHA, GQA, MQA, sliding windows and compressed keys (MLA), K and V of any cache
type, and both layouts of the cells: one pool for all sequences, or a separate range of cells
(stream) for each. There is no prediction for recurrent state and for caches that layers share or
index.

Source: src/llama-kv-cache.cpp, src/llama-kv-cache-iswa.cpp, load_swa_pattern and create_memory in
src/llama-model.cpp, and llama_init_from_model in src/llama-context.cpp.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from llmcli.errors import UserError
from quant.gguf.header import GgufArray

CELL_STEP = 256  # llama.cpp allocates cells in multiples of this
MAX_LAYERS = 512  # LLAMA_MAX_LAYERS in llama-hparams.h
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

# Which layers have a sliding window, for files that do not list them. Of every n layers, one is
# without a window: the last of the n, or the first if the flag is True (src/models/*.cpp,
# load_swa_pattern).
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
# Window sizes of files that name none. llama.cpp treats these architectures as windowed even if the
# size is 0.
ALWAYS_WINDOWED = {"gemma2": 4096, "gpt-oss": 0}
# Architectures whose layers attend to all tokens. llama.cpp disables the window of phi3, and does
# not read a window for the others.
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
# Architectures with MLA. If the file has `key_length_mla`, the cache has only compressed keys, from
# which the values are computed.
LATENT_ARCHS = {"deepseek2"}
# Architectures without a KV cache: embedding models, and models that write by diffusion
# (create_memory).
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
# Architectures with recurrent state, alone or beside attention (llm_arch_is_recurrent and
# llm_arch_is_hybrid in src/llama-arch.cpp)
RECURRENT_STATE_ARCHS = {
    "mamba",
    "mamba2",
    "rwkv6",
    "rwkv6qwen2",
    "rwkv7",
    "arwkv7",
    "jamba",
    "falcon-h1",
    "plamo2",
    "granitehybrid",
    "lfm2",
    "lfm2moe",
    "nemotron_h",
    "nemotron_h_moe",
    "qwen3next",
    "kimi-linear",
    "bailingmoe3",
    "kimi-k3",
    "glm5-next",
    "qwen35",
    "qwen35moe",
    "qwen4exp",
    "deepseek4",
    "minimax-01",
}
# Metadata keys (after the architecture) of models whose cache is not predicted.
UNPREDICTED_KEYS = (
    "ssm.",
    "wkv.",
    "attention.shared_kv_layers",
    "attention.indexer.",
    "shortconv.",
)


@dataclass(frozen=True, slots=True)
class LayerKV:
    """The predicted cache of one layer."""

    layer: int  # number of the layer from 0
    cells: int  # number of cells, over all streams
    k_bytes: int
    v_bytes: int


@dataclass(frozen=True, slots=True)
class CacheShape:
    """The properties of a model that determine the size of its KV cache. A tuple has one entry per
    layer, without the layers that predict further tokens (nextn_predict_layers).
    """

    k_values: tuple[int, ...]  # numbers that a cell stores for K
    v_values: tuple[int, ...]  # numbers that a cell stores for V; zeros if latent
    window: int  # tokens of the sliding window; 0 for none
    is_windowed: tuple[bool, ...]  # whether the layer has the sliding window
    k_heads: tuple[int, ...]  # numbers in the key of one head
    v_heads: tuple[int, ...]  # numbers in the value of one head
    widest_v: int  # the maximum of `v_values`, with the layers that predict further tokens
    is_latent: bool = False  # MLA: only keys are stored, and K and V must have the same type


@dataclass(frozen=True, slots=True)
class KVCache:
    """The predicted KV cache of a context."""

    layers: tuple[LayerKV, ...]
    cells: int  # number of cells of a layer without a sliding window
    bytes_per_token: int  # bytes of one token's cells in all layers together

    @property
    def nbytes(self) -> int:
        """Return the bytes of the whole cache."""
        return sum(layer.k_bytes + layer.v_bytes for layer in self.layers)


def read_shape(metadata: Mapping[str, Any]) -> CacheShape | None:
    """Return the cache shape of the model with this GGUF metadata. Return None when the model's
    cache cannot be predicted, or when the metadata is not valid.
    """
    try:
        return _read_shape(metadata)
    # a string or infinity instead of a number, or a list that is too short
    except (TypeError, ValueError, OverflowError):
        return None


@dataclass(frozen=True, slots=True)
class _Attention:
    """The attention settings in the metadata. The layers that predict further tokens
    (nextn_predict_layers) are the last of the file's layers.
    """

    n_layers: int  # number of layers, without those that predict further tokens
    kv_heads: tuple[int, ...]  # number of KV heads of every layer, with those layers
    k_size: int  # numbers in a key of one head
    v_size: int  # numbers in a value of one head
    windowed_k_size: int  # `k_size` of the layers with a sliding window
    windowed_v_size: int
    window: int  # tokens of the sliding window; 0 for none
    is_windowed: tuple[bool, ...]  # for each of the `n_layers` layers


def _read_shape(metadata: Mapping[str, Any]) -> CacheShape | None:
    """Return the cache shape like `read_shape`. Raises TypeError or ValueError when a value of the
    metadata has the wrong type.
    """
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
    """Return the attention settings in the metadata. Return None when they are not valid, or when
    it is unknown which layers have a sliding window.
    """
    n_all = _number(arch, metadata, "block_count")
    n_layers = n_all - _number(arch, metadata, "nextn_predict_layers")
    if not 0 < n_layers <= n_all <= MAX_LAYERS:
        return None
    heads = per_layer_numbers(metadata.get(f"{arch}.attention.head_count", 0), n_all)
    kv_heads = per_layer_numbers(
        metadata.get(f"{arch}.attention.head_count_kv", list(heads)), n_all
    )
    if not heads or not heads[0] or len(kv_heads) != n_all:
        return None
    window = 0
    if arch not in WINDOW_IGNORED_ARCHS:
        default_window = ALWAYS_WINDOWED.get(arch, 0)
        window = _number(arch, metadata, "attention.sliding_window", default_window)
    is_windowed = _windowed_layers(arch, metadata, n_layers, window)
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
    """Return the cache shape of MHA, GQA and MQA, which store keys and values of all KV heads."""
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
    """Return the cache shape of MLA, which stores only compressed keys."""
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
    """Return for each layer how many numbers a cell stores for K. `k_heads`: numbers in a key of
    one head.
    """
    kv_heads = attention.kv_heads[: attention.n_layers]
    return tuple(n * size for n, size in zip(kv_heads, k_heads, strict=True))


def _head_sizes(attention: _Attention) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return two tuples with one entry per layer: how many numbers a key of one head has, and how
    many a value has.
    """
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
    """Return the integer under `key` of the architecture, or `default` when the key is missing."""
    return int(metadata.get(f"{arch}.{key}", default))


def without_windows(shape: CacheShape) -> CacheShape:
    """Return the shape of the same model for a context in which layers with a sliding window keep
    the cells of all tokens (llama.cpp's swa_full).
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
    """Return the predicted KV cache of a context of `n_ctx` tokens. `unified`: all sequences share
    one pool of cells; otherwise each sequence has an equal share of the cells (a stream).

    `flash`: False only when flash attention is off. V is then stored transposed, and V of every
    layer has the width of the widest layer. When llama.cpp decides about flash attention, a
    quantized V turns it on.
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
    """Return the reason why llama.cpp cannot use these cache types for this model, and a hint.
    Return None if it can use them.

    Two cases are refused although llama.cpp does not report them. For a quantized K without flash
    attention and a head size that is not a multiple of BLOCK_VALUES, llama.cpp computes wrong
    results. For a window that no layer uses, it aborts the process.
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
    """Raise UserError when llama.cpp cannot use these cache types for the file with this metadata.
    Call this before the file is loaded, because loading may take minutes. `reproducible`: the types
    are required by --reproducible, so the hint does not suggest other types.
    """
    shape = read_shape(metadata)
    if shape and (reason := find_refusal(shape, type_k, type_v)):
        raise UserError(
            reason[0], hint="leave out --reproducible for this model" if reproducible else reason[1]
        )


def row_bytes(kind: str, values: int) -> int:
    """Return the bytes of `values` numbers in the cache type `kind`, such as "q8_0"."""
    return values * BYTES_PER_32[kind] // BLOCK_VALUES


def _windowed_layers(
    arch: str, metadata: Mapping[str, Any], layers: int, window: int
) -> tuple[bool, ...] | None:
    """Return for each layer whether it has the sliding window. Return None when this is not known
    for the architecture. `layers`: number of layers. `window`: tokens of the window, 0 for none.
    """
    if not window and arch not in ALWAYS_WINDOWED:
        return (False,) * layers
    pattern = metadata.get(f"{arch}.attention.sliding_window_pattern")
    if pattern is not None and not isinstance(pattern, int):
        flags = [bool(flag) for flag in _first_items(pattern, layers)]
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


def per_layer_numbers(value: Any, layers: int) -> tuple[int, ...]:
    """Return a metadata value as one integer per layer. A single integer holds for all layers. Raises
    TypeError and ValueError for anything else.
    """
    return (
        (int(value),) * layers
        if isinstance(value, int)
        else tuple(int(entry) for entry in _first_items(value, layers))
    )


def _first_items(value: Any, count: int) -> list[Any]:
    """Return the first `count` items of a list, or of an array of numbers that is not read from the
    file yet. Raises ValueError for an array of texts.
    """
    if not isinstance(value, GgufArray):
        return list(value)[:count]
    if value.kind == "string":
        raise ValueError("an array of texts")
    return list(value.head(count).read_values())


def round_up_cells(cells: int) -> int:
    """Return the number of cells that llama.cpp allocates for `cells`: the next multiple of 256."""
    return -(-cells // CELL_STEP) * CELL_STEP
