"""Run options that the user left open, resolved from the machine and the file before anything is
loaded.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

from llmcli.config import Config
from llmcli.errors import UserError
from llmcli.hardware import host
from llmcli.planning.attention_stub import HeadShape
from llmcli.planning.flash_attention_probe import AttentionCase, is_faster_without_flash
from llmcli.runtime import kv_size
from llmcli.runtime.binding import devices
from llmcli.runtime.binding.cache_types import check_cache_types
from llmcli.runtime.binding.kernels import gemm
from llmcli.runtime.engine import prefill_context
from llmcli.runtime.engine.forward_pass import TILE_ROWS
from llmcli.runtime.engine.schedule import Schedule
from llmcli.runtime.requests.request import RunOptions
from quant.model_file.model_header import ModelHeader

DEFAULT_MAX_CTX = 8192  # maximum of a context size that was not requested
# Sequences of a chat: the current branch and the three used before it, so that returning to one of
# them computes nothing. Each needs a row of logits, and its cells slow down the others.
CHAT_SEQUENCES = 4
SCORING_BYTES = 40 << 20  # bytes of logits of scored prompts in a pass
OFFLOAD_BYTES = Schedule().swap_bytes
RESERVED_BYTES = 256 << 20  # bytes left for compute buffers and other programs
# maximum number of parallel answers without flash attention
MAX_PLAIN_ANSWERS = 8
# bytes of a token's keys and values below which attention hardly matters and is not measured
MIN_TOKEN_BYTES = 4 << 10
MAX_SCORE_BYTES = 512 << 20  # bytes of attention scores that a pass may store


def resolve_options(
    header: ModelHeader,
    options: RunOptions,
    warn: Callable[[str], None],
    slots: int = 1,
    predict: int | None = None,
) -> tuple[RunOptions, int]:
    """Fill in the context size and threads. The second value is the number of layers on the GPU
    (-1: all).

    The context is the model's own, limited to 8192 and by the free memory; each of the further
    `slots` adds the tokens that it may `predict`, and a row of logits. Raises UserError for options
    that no model supports; `check_memory` decides whether this model can run.
    """
    validate_options(options)
    threads = options.threads or host.core_count()
    gpu = _gpu_layers(header, options)
    trained = header.context_length or 4096
    roomy = min(trained, DEFAULT_MAX_CTX)
    wanted = (
        kv_size.round_up_cells(roomy + (slots - 1) * min(predict or 0, roomy))
        if slots > 1
        else roomy
    )
    size = options.ctx_size or min(
        wanted, _fitting(header, options, slots, max(wanted, DEFAULT_MAX_CTX), on_gpu=gpu != 0)
    )
    if size > trained * slots:
        warn(f"a context of {size} exceeds the {trained} tokens this model was trained on")
    filled = replace(
        options, ctx_size=size, threads=threads, threads_batch=options.threads_batch or threads
    )
    return filled, gpu


def resolve_flash_attention(
    header: ModelHeader,
    options: RunOptions,
    gpu_layers: int,
    config: Config,
    slots: int = 1,
    parallel: int = 1,
) -> RunOptions:
    """Return the resolved options, with flash attention off if it was left open and this CPU is
    faster without.

    ggml's flash attention processes the cells one by one in passes of fewer than 64 rows
    (ggml-cpu/ops.cpp, use_tiled); the cost relative to plain attention depends on the processor and
    is measured. Prompts are slower without flash attention, so parallel prompts are then computed
    in a separate context with it. With more than MAX_PLAIN_ANSWERS parallel answers it stays on.
    Plain attention stores the scores of a pass, for which there must be memory.
    """
    request = _AttentionRequest(header, options, gpu_layers, slots, parallel)
    if any(is_reason(request) for is_reason in REASONS_TO_KEEP_FLASH):
        return options
    plain = _plan_plain_attention(request)
    if plain is None or _exceeds_memory(plain) or _is_measured_slower(plain, config):
        return options
    return replace(options, flash_attn="off", prefill_cells=plain.prefill_cells)


@dataclass(frozen=True, slots=True)
class _AttentionRequest:
    """A run whose attention is chosen. `parallel`: the number of answers at a time."""

    header: ModelHeader
    options: RunOptions
    gpu_layers: int
    slots: int
    parallel: int

    @property
    def cache_types(self) -> tuple[str, str]:
        """The types of K and V."""
        return self.options.cache_type_k, self.options.cache_type_v


@dataclass(frozen=True, slots=True)
class _PlainAttention:
    """What a run needs without flash attention, in bytes.

    `scores`: the attention scores of a pass. `free`: memory that is left beside weights and caches.
    `per_token`: keys and values of a token. `prefill_cells`: cells of the context in which parallel
    prompts are computed, 0: no such context. `case`: what the probe would measure.
    """

    scores: int
    free: int
    per_token: int
    prefill_cells: int
    case: AttentionCase


def _is_decided(request: _AttentionRequest) -> bool:
    """Return whether the user chose flash attention or a mode that requires it."""
    return request.options.flash_attn != "auto" or request.options.reproducible


def _has_quantized_cache(request: _AttentionRequest) -> bool:
    return not kv_size.FLOAT_TYPES.issuperset(request.cache_types)


def _uses_gpu(request: _AttentionRequest) -> bool:
    return request.gpu_layers != 0


def _has_latent_attention(request: _AttentionRequest) -> bool:
    return request.header.has_latent_attention


def _has_many_answers(request: _AttentionRequest) -> bool:
    return request.parallel > MAX_PLAIN_ANSWERS


def _has_fixed_cells(request: _AttentionRequest) -> bool:
    """Return whether parallel answers would need cells moved between two contexts that store values
    differently, which the model does not allow (state slicing).
    """
    header = request.header
    cache_shape = _shape(header, request.options)
    sections = header.metadata.get(f"{header.architecture}.rope.dimension_sections")
    has_window = cache_shape is not None and bool(cache_shape.window)
    return request.parallel > 1 and (has_window or sections is not None)


REASONS_TO_KEEP_FLASH: tuple[Callable[[_AttentionRequest], bool], ...] = (
    _is_decided,
    _has_quantized_cache,
    _uses_gpu,
    _has_latent_attention,
    _has_many_answers,
    _has_fixed_cells,
)


def _plan_plain_attention(request: _AttentionRequest) -> _PlainAttention | None:
    """Return what the run needs without flash attention; None if that is unknown."""
    header, options, types = request.header, request.options, request.cache_types
    cache_shape, cells, free = _shape(header, options), options.ctx_size, host.available_memory()
    heads = HeadShape.from_header(header, cache_shape) if cache_shape else None
    if cache_shape is None or heads is None or not cells or free is None or not options.threads:
        return None
    rows, prefill_cells = options.max_rows, 0
    if request.parallel > 1:
        rows = min(rows, prefill_context.DECODE_UBATCH_ROWS)
        prefill_cells = min(cells, prefill_context.MAX_CELLS)
    cache = kv_size.predict_cache(
        cache_shape, cells, *types, n_ubatch=rows, n_seq_max=request.slots, flash=False
    )
    free -= header.tensor_bytes + cache.nbytes + RESERVED_BYTES
    if prefill_cells:
        free -= kv_size.predict_cache(
            cache_shape,
            prefill_cells,
            *types,
            n_ubatch=options.ubatch_size,
            n_seq_max=request.slots,
        ).nbytes
    return _PlainAttention(
        scores=int(4 * heads.queries * rows * kv_size.round_up_cells(cells)),
        free=free,
        per_token=cache.bytes_per_token,
        prefill_cells=prefill_cells,
        case=AttentionCase(
            heads,
            *types,
            options.threads,
            options.threads_batch or options.threads,
            request.parallel,
        ),
    )


def _exceeds_memory(plain: _PlainAttention) -> bool:
    """Return whether the scores of a pass take too much memory."""
    return plain.scores > min(MAX_SCORE_BYTES, plain.free // 2)


def _is_measured_slower(plain: _PlainAttention, config: Config) -> bool:
    """Return whether plain attention is slower on this CPU. It is only measured if attention
    matters.
    """
    return plain.per_token >= MIN_TOKEN_BYTES and not is_faster_without_flash(plain.case, config)


def spare_sequences(header: ModelHeader, options: RunOptions) -> int:
    """Return the number of sequences of a chat's context. `options` must be resolved.

    It is 1 if branches cannot share cells: with a sliding window, which needs cells for each
    sequence, with recurrent state, and in the reproducible mode, where cells are in the order of
    one text.
    """
    cache_shape = kv_size.read_shape(header.metadata)
    if (
        options.reproducible
        or cache_shape is None
        or (
            cache_shape.window
            and kv_size.round_up_cells(options.ctx_size or 0) > cache_shape.window
        )
    ):
        return 1
    return CHAT_SEQUENCES


def scoring_outputs(header: ModelHeader) -> int:
    """Return the rows of logits that a pass of several answers reserves for scored prompts: two
    tiles, or as much as SCORING_BYTES allow; 0 if not even one tile fits.

    A pass computes at most as many rows of a scored prompt as it returns rows of logits, so few
    rows make scoring slow.
    """
    tile = 4 * _vocabulary_size(header) * TILE_ROWS
    return min(2, SCORING_BYTES // tile) * TILE_ROWS if tile else 0


def offload_bytes(free_bytes: int | None) -> int:
    """Return the bytes of host memory for offloaded answers in a full pool, and the same amount for
    finished ones. Together they take at most half of `free_bytes`.
    """
    return OFFLOAD_BYTES if free_bytes is None else min(OFFLOAD_BYTES, max(0, free_bytes) // 4)


def validate_options(options: RunOptions) -> None:
    """Raise UserError for an option value that no model supports."""
    for flag, value, limit in (
        ("--ctx-size", options.ctx_size, 2**31 - 1),
        ("--threads", options.threads, host.MAX_THREADS),
        ("--threads-batch", options.threads_batch, host.MAX_THREADS),
        ("--batch-size", options.batch_size, 2**31 - 1),
        ("--ubatch-size", options.ubatch_size, 2**31 - 1),
    ):
        if value is not None and not 1 <= value <= limit:
            raise UserError(
                f"{flag} is {value}", hint=f"{flag} takes a whole number from 1 to {limit}"
            )
    check_cache_types(options.cache_type_k, options.cache_type_v, options.flash_attn)
    gemm.check_mode(options.gemm)


def _fitting(header: ModelHeader, options: RunOptions, slots: int, most: int, on_gpu: bool) -> int:
    """Return the longest context up to `most` tokens, in steps of 256, whose cache fits next to the
    weights. At least 512 is assumed to fit.
    """
    free = devices.free_gpu_bytes() if on_gpu else host.available_memory()
    cache_shape = _shape(header, options)
    if free is None or cache_shape is None:
        return most
    available = free - header.tensor_bytes - RESERVED_BYTES - _output_bytes(header, slots)
    size = most

    def needed(cells: int) -> int:
        types = options.cache_type_k, options.cache_type_v
        return kv_size.predict_cache(
            cache_shape, cells, *types, n_ubatch=options.ubatch_size, n_seq_max=slots
        ).nbytes

    while size > 512 and needed(size) > available:
        size -= kv_size.CELL_STEP
    return size


def _shape(header: ModelHeader, options: RunOptions) -> kv_size.CacheShape | None:
    form = kv_size.read_shape(header.metadata)
    return kv_size.without_windows(form) if form and options.reproducible else form


def _output_bytes(header: ModelHeader, slots: int) -> int:
    """Return the bytes of the logits of all sequences except the first, which RESERVED_BYTES
    covers."""
    return 4 * _vocabulary_size(header) * (slots - 1)


def _vocabulary_size(header: ModelHeader) -> int:
    return next(
        (tensor.shape[-1] for tensor in header.tensors if tensor.name == "token_embd.weight"),
        0,
    )


def _gpu_layers(header: ModelHeader, options: RunOptions) -> int:
    requested = options.gpu_layers.strip().lower()
    if requested == "all":
        return -1
    if requested != "auto":
        if not re.fullmatch(r"-?[0-9]{1,6}", requested):
            raise UserError(
                f"--gpu-layers is {options.gpu_layers!r}",
                hint="-ngl takes a number of layers, auto or all",
            )
        return int(requested)
    free = devices.free_gpu_bytes()
    if free is None:
        return 0  # no GPU in this build or machine
    layers = int(header.get_int(f"{header.architecture}.block_count") or 1)
    share = (free - RESERVED_BYTES) * 0.9 / max(1, header.tensor_bytes)
    return -1 if share >= 1 else max(0, int(layers * share))
