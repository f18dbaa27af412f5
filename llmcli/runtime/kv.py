"""The bytes of a KV cache, predicted from the file's header before anything is allocated.

Follows src/llama-kv-cache.cpp, llama-kv-cache-iswa.cpp, load_swa_pattern and create_memory of
src/llama-model.cpp, and the refusals of llama_init_from_model in src/llama-context.cpp. Covers
attention layers: MHA, GQA, MQA, sliding windows, compressed keys (MLA), K and V of any cache type,
one pool or a stream a sequence. What it cannot know (recurrent state, shared or indexed caches) is
None, never a guess.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from llmcli.errors import UserError
from quant.container import Array

CELL_STEP = 256  # cells come in multiples of this
MAX_LAYERS = 512  # llama-hparams.h
BLOCK = 32  # values in a block of every quantized cache type

# Bytes of 32 values (ggml's block tables).
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
PLAIN = {"f32", "f16", "bf16"}

# Sliding-window layers where the file does not list them: every n-th layer is dense, counted from
# the end of the period, or from its start where `dense first` (src/models/*.cpp, load_swa_pattern).
PERIODS = {
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
# A window that the file need not name, and one that stays a window even at 0.
ALWAYS_WINDOWED = {"gemma2": 4096, "gpt-oss": 0}
# llama.cpp switches it off in phi3 and reads no window in the others: they attend to everything.
WINDOW_IGNORED = {
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
# Read `key_length_mla`: with it only the compressed keys are kept, and values are made from them.
LATENT = {"deepseek2"}
# No cache at all: made for embeddings, or they write by diffusion (create_memory).
CACHELESS = {
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
UNPREDICTED = ("ssm.", "wkv.", "attention.shared_kv_layers", "attention.indexer.", "shortconv.")


@dataclass(frozen=True, slots=True)
class LayerKV:
    """One layer's share: cells of all streams, and bytes of keys and values."""

    layer: int
    cells: int
    k_bytes: int
    v_bytes: int


@dataclass(frozen=True, slots=True)
class Shape:
    """What of a model decides the size of its cache, layer by layer: values a cell stores, sizes of
    a head, the window.

    `widest` is the largest `v` of any layer, those of a prediction head included. `latent`: keys
    only, and K and V of one type.
    """

    k: tuple[int, ...]  # values per cell
    v: tuple[int, ...]  # zeros where latent
    window: int  # 0: none, or none that counts
    windowed: tuple[bool, ...]
    k_heads: tuple[int, ...]  # values of a head
    v_heads: tuple[int, ...]
    widest: int
    latent: bool = False


@dataclass(frozen=True, slots=True)
class KVCache:
    """A predicted cache. `cells` are those of the dense layers; `bytes_per_token` counts every
    layer once.
    """

    layers: tuple[LayerKV, ...]
    cells: int
    bytes_per_token: int

    @property
    def nbytes(self) -> int:
        """Bytes of the whole cache."""
        return sum(layer.k_bytes + layer.v_bytes for layer in self.layers)


def shape(metadata: Mapping[str, Any]) -> Shape | None:
    """Read the shape from GGUF metadata; None where this file's cache follows other rules, or makes
    no sense.
    """
    try:
        return _shape(metadata)
    except (TypeError, ValueError):  # a word where a number belongs, a list that is too short
        return None


def _shape(metadata: Mapping[str, Any]) -> Shape | None:
    arch = str(metadata.get("general.architecture", ""))
    if arch in CACHELESS or any(
        key.startswith(f"{arch}.{part}") for key in metadata for part in UNPREDICTED
    ):
        return None

    def number(key: str, default: int) -> int:
        return int(metadata.get(f"{arch}.{key}", default))

    latent = arch in LATENT and number("attention.key_length_mla", 0) > 0
    if not latent and arch not in LATENT and number("attention.kv_lora_rank", 0):
        return None
    every = number("block_count", 0)
    layers = every - number("nextn_predict_layers", 0)
    if not 0 < layers <= every <= MAX_LAYERS:
        return None
    embd, heads = (
        number("embedding_length", 0),
        _per_layer(metadata.get(f"{arch}.attention.head_count", 0), every),
    )
    kv_heads = _per_layer(metadata.get(f"{arch}.attention.head_count_kv", list(heads)), every)
    if not heads or not heads[0] or len(kv_heads) != every:
        return None
    k = number("attention.key_length", embd // heads[0])
    v = number("attention.value_length", embd // heads[0])
    window = (
        0
        if arch in WINDOW_IGNORED
        else number("attention.sliding_window", ALWAYS_WINDOWED.get(arch, 0))
    )
    windowed = _windowed(arch, metadata, layers, window)
    if windowed is None:
        return None
    k_swa, v_swa = number("attention.key_length_swa", k), number("attention.value_length_swa", v)
    k_heads = tuple(k_swa if w else k for w in windowed)
    v_heads = tuple(v_swa if w else v for w in windowed)
    v_rows = [
        n * size for n, size in zip(kv_heads, (*v_heads, *(v,) * (every - layers)), strict=True)
    ]
    return Shape(
        tuple(n * size for n, size in zip(kv_heads[:layers], k_heads, strict=True)),
        (0,) * layers if latent else tuple(v_rows[:layers]),
        window,
        windowed,
        k_heads,
        v_heads,
        0 if latent else max(v_rows),
        latent,
    )


def whole(form: Shape) -> Shape:
    """The same model where windows keep every cell (llama.cpp's swa_full)."""
    return replace(form, window=0, windowed=(False,) * len(form.windowed))


def predict(
    form: Shape,
    n_ctx: int,
    type_k: str,
    type_v: str,
    *,
    n_ubatch: int,
    n_seq_max: int = 1,
    flash: bool = True,
    unified: bool = True,
) -> KVCache:
    """The cache of a context of `n_ctx` tokens: one pool, or (`unified` off) a stream for each
    sequence.

    Without flash attention V is stored transposed with the widest layer's width in every layer. A
    quantized V turns flash attention on where the choice is llama.cpp's.
    """
    cells, streams = round_up(n_ctx), 1
    if not unified:
        cells, streams = round_up(cells // n_seq_max), n_seq_max
    # llama.cpp computes this in 32 bits, and a header may name any window.
    wanted = (form.window * (n_seq_max if unified else 1) + min(n_ubatch, n_ctx)) % 2**32
    few = round_up(min(cells, wanted))
    layers = []
    for index, (k, v, windowed) in enumerate(zip(form.k, form.v, form.windowed, strict=True)):
        own = (few if windowed else cells) * streams
        v_row = row_bytes(type_v, v if flash else form.widest)
        layers.append(LayerKV(index, own, own * row_bytes(type_k, k), own * v_row))
    per_token = sum(row_bytes(type_k, k) for k in form.k)
    per_token += sum(row_bytes(type_v, v if flash else form.widest) for v in form.v)
    return KVCache(tuple(layers), cells * streams, per_token)


def refusal(form: Shape, type_k: str, type_v: str) -> tuple[str, str] | None:
    """Why llama.cpp would not make this cache, and what to type instead; None where it would.

    Refused as well: a quantized K of odd heads without flash attention, for which it computes
    nonsense, and a window that no layer has, at which it aborts.
    """
    if form.window and not any(form.windowed):
        return (
            f"this file names a sliding window of {form.window} and no layer that has it: llama.cpp cannot run it",
            "convert the model again from its checkpoint",
        )
    if form.latent and type_k != type_v:
        return (
            f"this model keeps compressed keys and makes values from them: K is {type_k}, V must not be {type_v}",
            f"give both alike: -ctk {type_k} -ctv {type_k}",
        )
    for what, flag, kind, heads in (
        ("K", "-ctk", type_k, form.k_heads),
        ("V", "-ctv", type_v, form.v_heads),
    ):
        odd = next((size for size in heads if size % BLOCK), None)
        if kind not in PLAIN and odd is not None:
            return (
                f"{kind} holds {what} in blocks of {BLOCK} values, and this model's heads have {odd}",
                f"use {flag} f16, bf16 or f32",
            )
    return None


def check(
    metadata: Mapping[str, Any], type_k: str, type_v: str, *, reproducible: bool = False
) -> None:
    """Raise UserError where llama.cpp would refuse these types for this file, before it is loaded;
    `reproducible`: that mode chose them, and no others would do.
    """
    form = shape(metadata)
    if form and (why := refusal(form, type_k, type_v)):
        raise UserError(
            why[0], hint="leave out --reproducible for this model" if reproducible else why[1]
        )


def row_bytes(kind: str, values: int) -> int:
    """Bytes of `values` numbers of one cache type."""
    return values * BYTES_PER_32[kind] // BLOCK


def _windowed(
    arch: str, metadata: Mapping[str, Any], layers: int, window: int
) -> tuple[bool, ...] | None:
    if not window and arch not in ALWAYS_WINDOWED:
        return (False,) * layers
    pattern = metadata.get(f"{arch}.attention.sliding_window_pattern")
    if pattern is not None and not isinstance(pattern, int):
        flags = [bool(flag) for flag in _list(pattern)[:layers]]
        return (*flags, *(False,) * (layers - len(flags)))
    if arch not in PERIODS:
        return None
    period, dense_first = PERIODS[arch]
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
        else tuple(int(one) for one in _list(value)[:layers])
    )


def _list(value: Any) -> list[Any]:
    return list(value.values() if isinstance(value, Array) else value)


def round_up(cells: int) -> int:
    """Cells as llama.cpp makes them: the next multiple of 256."""
    return -(-cells // CELL_STEP) * CELL_STEP
