"""Choose the options of a run that the user has not set, from the machine and the header of the
model file, before anything is loaded: context size, threads, GPU layers, flash attention.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from llmcli.config import Config
from llmcli.errors import UserError
from llmcli.hardware import host
from llmcli.planning.machine import Machine, read_machine
from llmcli.planning.measurements.attention_stub import HeadShape
from llmcli.planning.measurements.flash_attention_probe import (
    AttentionCase,
    is_faster_without_flash,
)
from llmcli.planning.measurements.product_trial import choose_products
from llmcli.planning.placement.placement_search import PlannedPlacement
from llmcli.planning.placement.plan_placement import (
    parse_expert_layers,
    parse_layers,
    plan_placement,
    planned_machine,
)
from llmcli.planning.placement.tensor_patterns import matches_any
from llmcli.planning.prediction.model_layout import read_layout
from llmcli.planning.prediction.thread_count import choose_threads
from llmcli.runtime import kv_size
from llmcli.runtime.binding.contexts.cache_types import check_cache_types
from llmcli.runtime.binding.kernels import gemm
from llmcli.runtime.binding.placement.model_placement import ModelPlacement
from llmcli.runtime.engine import prefill_context
from llmcli.runtime.engine.forward_pass import TILE_ROWS
from llmcli.runtime.requests.request import RunOptions
from llmcli.units import format_size
from quant.model_file.model_header import ModelHeader

DEFAULT_MAX_CTX = 8192  # maximum context size if the user sets none
UNKNOWN_CONTEXT = 4096  # context length of a model whose file does not say it
# Number of sequences in the context of a chat: the current branch and the three branches used last,
# whose cells stay cached. More would cost time: each sequence needs memory for a row of logits, and
# its cells slow down the others.
CHAT_SEQUENCES = 4
SCORING_BYTES = 40 << 20  # maximum bytes of logits in a pass for prompts that are scored
RESERVED_BYTES = 256 << 20  # memory that stays free for compute buffers and other programs
MAX_PLAIN_ANSWERS = 8  # with more parallel answers, flash attention stays on
# If K and V of a token take fewer bytes, attention takes hardly any time, and is not measured.
MIN_TOKEN_BYTES = 4 << 10
MAX_SCORE_BYTES = 512 << 20  # maximum bytes of attention scores that a pass may store


def resolve_options(
    header: ModelHeader,
    options: RunOptions,
    warn: Callable[[str], None],
    slots: int = 1,
    predict: int | None = None,
    note: Callable[[str], None] = lambda text: None,
    machine: Machine | None = None,
    max_default: int = DEFAULT_MAX_CTX,
    config: Config | None = None,
) -> tuple[RunOptions, ModelPlacement]:
    """Fill in the context size and the numbers of threads. Return the options, and the placement of
    the weights.

    If the user has set no context size, it is the length that the model was trained on, but at most
    `max_default` tokens and at most what fits into the free memory. Each of the `slots` sequences
    after the first adds `predict` tokens, the length of an answer.

    `warn` receives a message about a context that is longer than the model was trained on. `note`
    receives one about each default that the free memory has lowered. `machine`: by default this
    one. `config`: where results of measurements are saved. With it, weights whose products ggml
    computes faster here are left to ggml. Raises UserError for option values that no model
    supports. Whether this model fits into memory is checked later, by `check_memory`.
    """
    validate_options(options)
    machine = machine or read_machine()
    trained = trained_context(header)
    default_size = min(trained, max_default)
    if slots > 1:
        answer_tokens = (slots - 1) * min(predict or 0, default_size)
        default_size = kv_size.round_up_cells(default_size + answer_tokens)
    check_positions(header, options.ctx_size or 0)
    default_size = min(default_size, header.max_positions or default_size)
    for override in options.tensor_overrides:
        if not matches_any(override.pattern, (tensor.name for tensor in header.tensors)):
            warn(
                f"--override-tensor: no tensor of {header.path.name} matches {override.pattern!r}; "
                f"llmcli show {header.path.name} --tensors lists their names"
            )
    if parse_expert_layers(options.cpu_moe) and not read_layout(header).has_experts:
        warn(f"{header.path.name} has no experts: --n-cpu-moe and --cpu-moe have no effect")
    planned = plan_placement(header, options, machine, default_size, slots)
    machine = planned_machine(options, machine)
    size = options.ctx_size or min(planned.n_ctx, default_size)
    _note_lowered_defaults(header, options, machine, planned, default_size, note)
    if size > trained * slots:
        warn(_describe_excess(size, trained))
    filled = replace(
        options,
        ctx_size=size,
        threads=options.threads or choose_threads(machine.processor, read_layout(header)),
        adapts_threads=options.threads is None,
        overlaps_passes=planned.placement.uses_gpu,  # on a CPU it gains nothing
        threads_batch=options.threads_batch or options.threads or machine.processor.usable_cores,
    )
    if config is None or options.reproducible:
        return filled, planned.placement
    assert filled.threads, filled
    left_to_ggml = choose_products(header, planned.placement, filled.threads, config)
    return filled, replace(planned.placement, ggml_types=left_to_ggml)


def _note_lowered_defaults(
    header: ModelHeader,
    options: RunOptions,
    machine: Machine,
    planned: PlannedPlacement,
    default_size: int,
    note: Callable[[str], None],
) -> None:
    """Pass to `note` a message about each default that the free memory has lowered."""
    placement, layers = planned.placement, header.get_int("block_count") or 0
    weights = format_size(header.tensor_bytes)
    free = {device.name: device.free_bytes for device in machine.devices}
    on_devices = " + ".join(format_size(nbytes) for nbytes in free.values())
    if machine.devices and parse_layers(options.gpu_layers) is None:
        reason = f"because {on_devices} are free there (weights {weights})"
        if not placement.gpu_layers and header.tensor_bytes <= sum(free.values()):
            note(
                "no layers are on the GPU: the processor is estimated to be as fast for this model; "
                "-ngl N overrides this"
            )
        elif 0 <= placement.gpu_layers <= layers:
            note(
                f"{placement.gpu_layers} of {layers + 1} layers (with the output) are on the GPU, "
                f"{reason}; "
                "-ngl N overrides this"
            )
        if placement.cpu_moe_layers and options.cpu_moe == "auto":
            count = layers if placement.cpu_moe_layers < 0 else placement.cpu_moe_layers
            note(
                f"the experts of {count} of {layers} layers stay in the host's memory, {reason}; "
                "--n-cpu-moe N overrides this"
            )
    if options.ctx_size is None and planned.n_ctx < default_size and machine.free_bytes is not None:
        on_device = placement.uses_gpu and bool(free)
        where = f"{on_devices} are free on the GPU" if on_device else ""
        where = where or f"{format_size(machine.free_bytes)} are free in memory"
        note(
            f"{planned.n_ctx:,} tokens of context instead of {default_size:,}, because {where} "
            f"(weights {weights}); -c N overrides this"
        )


def trained_context(header: ModelHeader) -> int:
    """Return the number of tokens that the model was trained on, as its file says."""
    return header.context_length or UNKNOWN_CONTEXT


def longest_text(header: ModelHeader, wanted: int | None, warn: Callable[[str], None]) -> int:
    """Return how many tokens a text may have that is embedded or ranked: `wanted`, or by default
    the length that the model was trained on, but at most DEFAULT_MAX_CTX tokens. `warn` receives a
    message about a longer one. Raises UserError if the model has fewer positions.
    """
    trained = trained_context(header)
    check_positions(header, wanted or 0)
    if wanted is not None and wanted > trained:
        warn(_describe_excess(wanted, trained))
    default = min(trained, DEFAULT_MAX_CTX)
    return wanted or min(default, header.max_positions or default)


def _describe_excess(size: int, trained: int) -> str:
    return f"a context of {size} exceeds the {trained} tokens this model was trained on"


def check_positions(header: ModelHeader, size: int, hint: str = "") -> None:
    """Raise UserError for a context of `size` tokens if the model has fewer positions. `hint`: what
    to do, in place of a smaller -c.
    """
    if header.max_positions is not None and size > header.max_positions:
        raise UserError(
            f"{header.path.name} has learned {header.max_positions:,} positions, so a context of "
            f"{size:,} tokens would crash llama.cpp",
            hint=hint or f"-c {header.max_positions}",
        )


def resolve_flash_attention(
    header: ModelHeader,
    options: RunOptions,
    placement: ModelPlacement,
    config: Config,
    slots: int = 1,
    parallel: int = 1,
) -> RunOptions:
    """Return the options with flash attention turned off if this CPU computes attention faster
    without it. Otherwise, or if the user has set flash attention, return them unchanged.
    `parallel`: number of answers at once.

    In passes of fewer than 64 tokens, ggml's flash attention processes cells one by one
    (ggml-cpu/ops.cpp, use_tiled). Whether this is slower than plain attention, which computes and
    stores all scores, depends on the processor, so it is measured. Prompts are always faster with
    flash attention; a separate context with flash attention computes those of parallel answers.

    Flash attention stays on with more than MAX_PLAIN_ANSWERS parallel answers, and if there is no
    memory for the scores of plain attention.
    """
    request = _AttentionRequest(header, options, placement, slots, parallel)
    if any(is_reason(request) for is_reason in REASONS_TO_KEEP_FLASH):
        return options
    plain = _plan_plain_attention(request)
    if plain is None or _exceeds_memory(plain) or _is_measured_slower(plain, config):
        return options
    return replace(options, flash_attn="off", prefill_cells=plain.prefill_cells)


@dataclass(frozen=True, slots=True)
class _AttentionRequest:
    """A run for which to choose between flash attention and plain attention."""

    header: ModelHeader
    options: RunOptions
    placement: ModelPlacement
    slots: int  # number of sequences in the context
    parallel: int  # number of answers at once

    @property
    def cache_types(self) -> tuple[str, str]:
        """Return the cache types of K and V."""
        return self.options.cache_type_k, self.options.cache_type_v


@dataclass(frozen=True, slots=True)
class _PlainAttention:
    """What a run without flash attention needs."""

    scores: int  # bytes of the attention scores of a pass
    free: int  # bytes of memory that the weights and the KV cache leave free
    per_token: int  # bytes of K and V of one token
    prefill_cells: int  # cells of the separate context for parallel prompts; 0: no such context
    case: AttentionCase  # the conditions under which to measure attention


def _is_decided(request: _AttentionRequest) -> bool:
    """Return whether the user has set flash attention, or --reproducible, which requires it."""
    return request.options.flash_attn != "auto" or request.options.reproducible


def _has_quantized_cache(request: _AttentionRequest) -> bool:
    """Return whether K or V is quantized. A quantized V requires flash attention."""
    return not kv_size.FLOAT_TYPES.issuperset(request.cache_types)


def _uses_gpu(request: _AttentionRequest) -> bool:
    return request.placement.uses_gpu


def _has_latent_attention(request: _AttentionRequest) -> bool:
    return request.header.has_latent_attention


def _has_many_answers(request: _AttentionRequest) -> bool:
    return request.parallel > MAX_PLAIN_ANSWERS


def _has_fixed_cells(request: _AttentionRequest) -> bool:
    """Return whether there are parallel answers, but the KV cells of this model cannot be moved
    between contexts.

    The prompts of parallel answers are computed in a second context with flash attention, and their
    cells are then moved to the context without it (binding/kv_state/state_slicing.py). This is not
    possible with a sliding window or with RoPE sections.
    """
    header = request.header
    cache_shape = _read_cache_shape(header, request.options)
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
    """Return what the run needs without flash attention, or None if this is unknown."""
    header, options, types = request.header, request.options, request.cache_types
    cache_shape, cells, free = (
        _read_cache_shape(header, options),
        options.ctx_size,
        host.available_memory(),
    )
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
    """Return whether the attention scores of a pass take more than MAX_SCORE_BYTES or more than
    half of the free memory.
    """
    return plain.scores > min(MAX_SCORE_BYTES, plain.free // 2)


def _is_measured_slower(plain: _PlainAttention, config: Config) -> bool:
    """Return whether attention takes noticeable time and plain attention is not clearly faster on
    this CPU. This measures if no result is saved.
    """
    return plain.per_token >= MIN_TOKEN_BYTES and not is_faster_without_flash(plain.case, config)


def spare_sequences(header: ModelHeader, options: RunOptions) -> int:
    """Return the number of sequences in the context of a chat: CHAT_SEQUENCES, or 1 if the branches
    of a chat cannot share cells. `options` must be resolved.

    Branches cannot share cells with a sliding window shorter than the context, with recurrent
    state, and with --reproducible, where the cells must have the order of a single text.
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
    """Return how many rows of logits to reserve in each pass for requests that score their prompt.
    The result is two tiles of TILE_ROWS rows, one, or 0: as many as fit into SCORING_BYTES.

    A pass can score only as many prompt tokens as it has rows of logits, so few rows make scoring
    slow.
    """
    tile = 4 * _vocabulary_size(header) * TILE_ROWS
    return min(2, SCORING_BYTES // tile) * TILE_ROWS if tile else 0


def validate_options(options: RunOptions) -> None:
    """Raise UserError for an option value that is wrong for every model, such as 0 threads."""
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
    if options.split_mode == "tensor" and options.flash_attn == "off":
        raise UserError("-sm tensor needs flash attention", hint="-fa on, or -sm layer")
    gemm.check_mode(options.gemm)


def _read_cache_shape(header: ModelHeader, options: RunOptions) -> kv_size.CacheShape | None:
    """Return the cache shape of the model with these options, or None if it is unknown. With
    --reproducible, layers with a sliding window keep all cells.
    """
    shape = kv_size.read_shape(header.metadata)
    return kv_size.without_windows(shape) if shape and options.reproducible else shape


def _vocabulary_size(header: ModelHeader) -> int:
    """Return the number of rows of the embedding table, or 0 if the file has none."""
    return next(
        (tensor.shape[-1] for tensor in header.tensors if tensor.name == "token_embd.weight"),
        0,
    )
