"""Options of a run that the user did not set, chosen from the machine and the file's header before
anything is loaded.
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

DEFAULT_MAX_CTX = 8192  # maximum context size if the user sets none
# Number of sequences in a chat: the current branch and the three used last, so that returning to
# one of these computes nothing. There are not more, because each sequence needs a row of logits,
# and its cells slow down the other ones.
CHAT_SEQUENCES = 4
SCORING_BYTES = 40 << 20  # maximum bytes of logits in a pass for prompts that are scored
OFFLOAD_BYTES = Schedule().swap_bytes
RESERVED_BYTES = 256 << 20  # bytes that stay free for compute buffers and other programs
# with more parallel answers, flash attention stays on
MAX_PLAIN_ANSWERS = 8
# If the keys and values of a token take fewer bytes, attention hardly takes time, and is not
# measured.
MIN_TOKEN_BYTES = 4 << 10
MAX_SCORE_BYTES = 512 << 20  # maximum bytes of attention scores that a pass may store


def resolve_options(
    header: ModelHeader,
    options: RunOptions,
    warn: Callable[[str], None],
    slots: int = 1,
    predict: int | None = None,
) -> tuple[RunOptions, int]:
    """Fill in the context size and the numbers of threads. Returns the options, and the number of
    layers on the GPU (-1: all).

    If the user sets no context size, it is that of the model, at most DEFAULT_MAX_CTX, and what
    fits into the free memory. Each of the `slots` after the first adds the tokens of an answer
    (`predict`) to the context. Raises UserError for option values that no model supports. Whether
    this model fits is not checked here, but by `check_memory`.
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
    """Return the resolved options. Flash attention is turned off if the user did not set it and
    this CPU computes attention faster without it.

    In passes of fewer than 64 rows, ggml's flash attention processes cells one by one
    (ggml-cpu/ops.cpp, use_tiled). Whether this is slower than plain attention depends on the
    processor, so it is measured. Prompts are slower without flash attention. If there are parallel
    answers, a separate context with flash attention computes their prompts. Flash attention stays
    on with more than MAX_PLAIN_ANSWERS parallel answers, and if there is no memory for the scores
    that plain attention stores.
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
    """A run for which to choose between flash attention and plain attention. `parallel`: number of
    answers at a time.
    """

    header: ModelHeader
    options: RunOptions
    gpu_layers: int
    slots: int
    parallel: int

    @property
    def cache_types(self) -> tuple[str, str]:
        """The types of K and V in the cache."""
        return self.options.cache_type_k, self.options.cache_type_v


@dataclass(frozen=True, slots=True)
class _PlainAttention:
    """The needs of a run without flash attention, in bytes.

    `scores`: attention scores of a pass. `free`: memory that weights and caches leave free.
    `per_token`: keys and values of one token. `prefill_cells`: size in cells of the separate
    context for parallel prompts, 0: there is none. `case`: the conditions under which to measure
    attention.
    """

    scores: int
    free: int
    per_token: int
    prefill_cells: int
    case: AttentionCase


def _is_decided(request: _AttentionRequest) -> bool:
    """Return whether the user chose flash attention on or off, or a mode that requires it."""
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
    """Return whether parallel answers rule out plain attention, because the model's cells cannot be
    moved.

    The prompts of parallel answers are computed in a context with flash attention, which stores
    values differently. Their cells must be moved to the other context, and this model does not
    allow it (state slicing).
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
    """Return the needs of a run without flash attention; None if they are unknown."""
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
    """Return whether the attention scores of a pass take too much memory."""
    return plain.scores > min(MAX_SCORE_BYTES, plain.free // 2)


def _is_measured_slower(plain: _PlainAttention, config: Config) -> bool:
    """Return whether to keep flash attention because of speed: attention takes hardly any time, or
    plain attention was not clearly faster on this CPU.
    """
    return plain.per_token >= MIN_TOKEN_BYTES and not is_faster_without_flash(plain.case, config)


def spare_sequences(header: ModelHeader, options: RunOptions) -> int:
    """Return how many sequences the context of a chat has. `options` must be resolved.

    The number is 1 if branches of the chat cannot share cells. This is so with a sliding window,
    which needs cells for each sequence, with recurrent state, and in the reproducible mode, in
    which cells have the order of a single text.
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
    """Return how many rows of logits a pass of several answers reserves for prompts that are
    scored. This is two tiles, or one if two exceed SCORING_BYTES, or 0 if one does.

    A pass computes as many rows of a scored prompt as it has rows of logits, so few rows make
    scoring slow.
    """
    tile = 4 * _vocabulary_size(header) * TILE_ROWS
    return min(2, SCORING_BYTES // tile) * TILE_ROWS if tile else 0


def offload_bytes(free_bytes: int | None) -> int:
    """Return the maximum bytes of host memory for answers that are offloaded because the pool is
    full. Finished answers may take the same amount, so both together take at most half of
    `free_bytes`.
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
    """Return the longest context whose cache fits next to the weights, from `most` tokens down in
    steps of 256. Contexts of 512 tokens or fewer are not checked.
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
    """Return the bytes of the logits of all sequences after the first. RESERVED_BYTES includes
    those of the first.
    """
    return 4 * _vocabulary_size(header) * (slots - 1)


def _vocabulary_size(header: ModelHeader) -> int:
    return next(
        (tensor.shape[-1] for tensor in header.tensors if tensor.name == "token_embd.weight"),
        0,
    )


def _gpu_layers(header: ModelHeader, options: RunOptions) -> int:
    """Return the number of layers on the GPU for -ngl; -1: all.

    For `auto`, the number is estimated from the bytes of the weights and the free GPU memory,
    without a dry run. `largest_gpu_layers` in memory_plan.py does not decide this: it only reports
    the largest number that fits, for `llmcli plan`. Raises UserError for an invalid -ngl.
    """
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
