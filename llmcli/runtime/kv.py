"""The bytes of a KV cache, predicted from the file's header before anything is allocated.

Follows src/llama-kv-cache.cpp, llama-kv-cache-iswa.cpp and load_swa_pattern of src/llama-model.cpp.
Covers attention layers (MHA, GQA, MQA, sliding windows, K and V of any cache type). What it cannot
know (latent attention, recurrent state, shared or indexed caches) is None, never a guess.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quant.container import Array

CELL_STEP = 256  # cells come in multiples of this
MAX_LAYERS = 512  # llama-hparams.h

# Bytes of 32 values (ggml's block tables).
BYTES_PER_32 = {
    "f32": 128, "f16": 64, "bf16": 64, "q8_0": 34, "q5_1": 24, "q5_0": 22, "q4_1": 20, "q4_0": 18, "iq4_nl": 18,
}  # fmt: skip

# Sliding-window layers where the file does not list them: every n-th layer is dense, counted from
# the end of the period, or from its start where `dense first` (src/models/*.cpp, load_swa_pattern).
PERIODS = {
    "gemma2": (2, False), "gemma3": (6, False), "cohere2": (4, False), "exaone4": (4, False), "gpt-oss": (2, False),
    "olmo2": (4, False), "smallthinker": (4, True), "plamo3": (8, False), "afmoe": (4, False),
}  # fmt: skip
WINDOW_IGNORED = {"phi3"}  # llama.cpp switches it off there
UNPREDICTED = (
    "ssm.",
    "wkv.",
    "attention.kv_lora_rank",
    "attention.shared_kv_layers",
    "attention.indexer.",
    "shortconv.",
)


@dataclass(frozen=True, slots=True)
class LayerKV:
    """One layer's share: cells, and bytes of keys and values."""

    layer: int
    cells: int
    k_bytes: int
    v_bytes: int


@dataclass(frozen=True, slots=True)
class Shape:
    """What of a model decides the size of its cache: values a cell stores per layer, and the window."""

    k: tuple[int, ...]  # values per cell, layer by layer
    v: tuple[int, ...]
    window: int  # 0: none
    windowed: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class KVCache:
    """A predicted cache. `cells` are those of the dense layers; `bytes_per_token` counts every layer once."""

    layers: tuple[LayerKV, ...]
    cells: int
    bytes_per_token: int

    @property
    def nbytes(self) -> int:
        """Bytes of the whole cache."""
        return sum(layer.k_bytes + layer.v_bytes for layer in self.layers)


def shape(metadata: Mapping[str, Any]) -> Shape | None:
    """Read the shape from GGUF metadata; None where this file's cache follows other rules, or makes no sense."""
    try:
        return _shape(metadata)
    except (TypeError, ValueError):  # a word where a number belongs, a list that is too short
        return None


def _shape(metadata: Mapping[str, Any]) -> Shape | None:
    arch = str(metadata.get("general.architecture", ""))
    if any(key.startswith(f"{arch}.{part}") for key in metadata for part in UNPREDICTED):
        return None

    def number(key: str, default: int) -> int:
        return int(metadata.get(f"{arch}.{key}", default))

    layers = number("block_count", 0) - number("nextn_predict_layers", 0)
    if not 0 < layers <= MAX_LAYERS:
        return None
    embd, heads = number("embedding_length", 0), _per_layer(metadata.get(f"{arch}.attention.head_count", 0), layers)
    kv_heads = _per_layer(metadata.get(f"{arch}.attention.head_count_kv", list(heads)), layers)
    if not heads or not heads[0] or not kv_heads:
        return None
    k = number("attention.key_length", embd // heads[0])
    v = number("attention.value_length", embd // heads[0])
    window = 0 if arch in WINDOW_IGNORED else number("attention.sliding_window", 0)
    windowed = _windowed(arch, metadata, layers, window)
    if windowed is None:
        return None
    k_swa, v_swa = number("attention.key_length_swa", k), number("attention.value_length_swa", v)
    return Shape(
        tuple(n * (k_swa if w else k) for n, w in zip(kv_heads, windowed, strict=True)),
        tuple(n * (v_swa if w else v) for n, w in zip(kv_heads, windowed, strict=True)),
        window if any(windowed) else 0,
        windowed,
    )


def predict(
    form: Shape, n_ctx: int, type_k: str, type_v: str, *, n_ubatch: int, n_seq_max: int = 1, flash: bool = True
) -> KVCache:
    """The cache of one unified pool of `n_ctx` tokens (rounded up to 256 cells).

    Without flash attention V is stored transposed with the widest layer's width in every layer.
    """
    cells = round_up(n_ctx)
    few = min(cells, round_up(form.window * n_seq_max + n_ubatch))
    widest = max(form.v)
    layers = []
    for index, (k, v, windowed) in enumerate(zip(form.k, form.v, form.windowed, strict=True)):
        own = few if windowed else cells
        layers.append(LayerKV(index, own, own * row_bytes(type_k, k), own * row_bytes(type_v, v if flash else widest)))
    per_token = sum((layer.k_bytes + layer.v_bytes) // layer.cells for layer in layers)
    return KVCache(tuple(layers), cells, per_token)


def row_bytes(kind: str, values: int) -> int:
    """Bytes of `values` numbers of one cache type."""
    return values * BYTES_PER_32[kind] // 32


def _windowed(arch: str, metadata: Mapping[str, Any], layers: int, window: int) -> tuple[bool, ...] | None:
    if not window:
        return (False,) * layers
    pattern = metadata.get(f"{arch}.attention.sliding_window_pattern")
    if pattern is not None and not isinstance(pattern, int):
        return tuple(bool(flag) for flag in _list(pattern)[:layers])
    if arch not in PERIODS:
        return None
    period, dense_first = PERIODS[arch]
    period = period if pattern is None else int(pattern)
    if period == 0:
        return (True,) * layers
    return tuple(bool(i % period) if dense_first else i % period < period - 1 for i in range(layers))


def _per_layer(value: Any, layers: int) -> tuple[int, ...]:
    return (int(value),) * layers if isinstance(value, int) else tuple(int(one) for one in _list(value)[:layers])


def _list(value: Any) -> list[Any]:
    return list(value.values() if isinstance(value, Array) else value)


def round_up(cells: int) -> int:
    """Cells as llama.cpp makes them: the next multiple of 256."""
    return -(-cells // CELL_STEP) * CELL_STEP
