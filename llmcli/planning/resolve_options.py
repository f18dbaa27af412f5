"""What was left open in the run options, decided from the machine and the file before anything is
loaded.
"""

import re
from collections.abc import Callable
from dataclasses import replace

from llmcli.config import Config
from llmcli.errors import UserError
from llmcli.hardware import host
from llmcli.planning.attention_stub import Heads
from llmcli.planning.flash_attention_probe import Question, sooner_without
from llmcli.runtime import kv_size
from llmcli.runtime.binding import devices
from llmcli.runtime.binding.cache_types import check_cache_types
from llmcli.runtime.binding.kernels import gemm
from llmcli.runtime.engine import prefill_context
from llmcli.runtime.engine.forward_pass import TILE_ROWS
from llmcli.runtime.engine.schedule import Schedule
from llmcli.runtime.requests.request import RunOptions
from quant.model_file.model_header import ModelHeader

ROOMY = 8192  # a context nobody asked for stays below this
# Sequences of a chat: the branch that goes on and the three used before it, so that going back to
# one computes nothing. Each takes a row of logits (four bytes a word), and their cells cost the
# others: with 1,000 cells of another branch in the pool a token of SmolLM2 took 4 to 8 % longer,
# with 3,000 18 % (200 tokens of its own, one AVX2 thread, 2026-11).
BRANCHES = 4
SCORED = 40 << 20  # bytes of logits that scored prompts may take in a pass
SWAP = Schedule().swap_bytes
SPARE = 256 << 20  # bytes left for compute buffers and everybody else
# answers at once; a Xeon took 251 ms for a pass of sixteen without flash attention and 203 with it
FEW = 8
COUNTS = (
    4 << 10
)  # bytes of a token's keys and values, below which a pass spends its time elsewhere: not measured
SCORES = 512 << 20  # bytes of attention's scores that a pass may write out


def decide(
    header: ModelHeader,
    options: RunOptions,
    warn: Callable[[str], None],
    slots: int = 1,
    predict: int | None = None,
) -> tuple[RunOptions, int]:
    """Fill in context size and threads; the second value is the number of layers for the GPU (-1:
    all).

    The context is the model's own, capped by 8192 and by the memory that is free; each of further
    `slots` adds what it may `predict`, and a row of logits. Raises UserError for a wish that no
    model could be run with; whether this one can be run is admit.py's to say.
    """
    check(options)
    threads = options.threads or host.cores()
    gpu = _gpu_layers(header, options)
    trained = header.context_length or 4096
    roomy = min(trained, ROOMY)
    wanted = (
        kv_size.round_up_cells(roomy + (slots - 1) * min(predict or 0, roomy))
        if slots > 1
        else roomy
    )
    size = options.ctx_size or min(
        wanted, _fitting(header, options, slots, max(wanted, ROOMY), on_gpu=gpu != 0)
    )
    if size > trained * slots:
        warn(f"a context of {size} is longer than the {trained} tokens this model was trained on")
    filled = replace(
        options, ctx_size=size, threads=threads, threads_batch=options.threads_batch or threads
    )
    return filled, gpu


def attention(
    header: ModelHeader,
    options: RunOptions,
    gpu_layers: int,
    config: Config,
    slots: int = 1,
    parallel: int = 1,
) -> RunOptions:
    """The decided options with flash attention off where nobody asked for it and this CPU answers
    sooner without.

    ggml's goes over the cells one by one in passes of fewer than 64 rows (ggml-cpu/ops.cpp,
    use_tiled); what that costs beside the other way is the processor's affair, and measured
    (attention.py). Where it is off, prompts read slower: on a Xeon with AMX 815 tokens a second
    instead of 1,180 (SmolLM2-135M, llama-bench, 2026-11). So where several are answered they are
    read apart (runtime/reader.py); with more than FEW at once it stays on. Without it a pass's
    scores are written out, for which there must be room.
    """
    types = options.cache_type_k, options.cache_type_v
    decided = (
        options.flash_attn != "auto"
        or not kv_size.FLOAT_TYPES.issuperset(types)
        or options.reproducible
    )
    if decided or gpu_layers or header.has_latent_attention or parallel > FEW:
        return options
    form, cells, free = _shape(header, options), options.ctx_size, host.available_memory()
    heads = Heads.of(header, form) if form else None
    if form is None or heads is None or not cells or free is None or not options.threads:
        return options
    rows, reading = options.max_rows, 0
    if parallel > 1:
        if not _moves(header, form):
            return options
        rows, reading = (
            min(rows, prefill_context.DECODE_UBATCH_ROWS),
            min(cells, prefill_context.MAX_CELLS),
        )
    scores = int(4 * heads.queries * rows * kv_size.round_up_cells(cells))
    cache = kv_size.predict_cache(form, cells, *types, n_ubatch=rows, n_seq_max=slots, flash=False)
    left = free - header.tensor_bytes - cache.nbytes - SPARE
    if reading:
        left -= kv_size.predict_cache(
            form, reading, *types, n_ubatch=options.ubatch_size, n_seq_max=slots
        ).nbytes
    if scores > min(SCORES, left // 2):
        return options
    question = Question(
        heads, *types, options.threads, options.threads_batch or options.threads, parallel
    )
    if cache.bytes_per_token >= COUNTS and not sooner_without(question, config):
        return options
    return replace(options, flash_attn="off", prefill_cells=reading)


def _moves(header: ModelHeader, form: kv_size.CacheShape) -> bool:
    """Whether what one context computed can be put into another that keeps values otherwise
    (binding/carved.py).
    """
    sections = header.metadata.get(f"{header.architecture}.rope.dimension_sections")
    return not form.window and sections is None


def branches(header: ModelHeader, options: RunOptions) -> int:
    """How many sequences a chat's context should hold, `options` being decided.

    One where branches cannot share cells: a window wants cells for each sequence, recurrent state
    is kept whole, and in the reproducible mode cells stand in the order of one text.
    """
    form = kv_size.read_shape(header.metadata)
    if (
        options.reproducible
        or form is None
        or (form.window and kv_size.round_up_cells(options.ctx_size or 0) > form.window)
    ):
        return 1
    return BRANCHES


def scored(header: ModelHeader) -> int:
    """Rows of logits that a pass of several answers has room for beside theirs (RunOptions.scored):
    two tiles, or what SCORED bytes hold; none where they hold no tile.

    A pass computes no more rows of a prompt that is scored than it gives logits. SmolLM2, 512
    tokens, CPU seconds of one AVX-512 thread, 1.0 unscored: 6.0 with 16 rows, 2.0 with 80 (compute
    buffer as large as with 16), 1.3 with 144 (13 MB larger); logits take 4 bytes a word and row
    beside that once they are asked for (2026-11).
    """
    tile = 4 * _words(header) * TILE_ROWS
    return min(2, SCORED // tile) * TILE_ROWS if tile else 0


def outside(free: int | None) -> int:
    """Bytes that answers which gave way in a full pool may take beside it, and as many again those
    that are over: together at most half of what is `free` then (Schedule.swap_bytes).
    """
    return SWAP if free is None else min(SWAP, max(0, free) // 4)


def check(options: RunOptions) -> None:
    """Raise UserError for an option that no model could be run with."""
    for flag, value, most in (
        ("--ctx-size", options.ctx_size, 2**31 - 1),
        ("--threads", options.threads, host.MOST_THREADS),
        ("--threads-batch", options.threads_batch, host.MOST_THREADS),
        ("--batch-size", options.batch_size, 2**31 - 1),
        ("--ubatch-size", options.ubatch_size, 2**31 - 1),
    ):
        if value is not None and not 1 <= value <= most:
            raise UserError(
                f"{flag} is {value}", hint=f"{flag} takes a whole number from 1 to {most}"
            )
    check_cache_types(options.cache_type_k, options.cache_type_v, options.flash_attn)
    gemm.check_mode(options.gemm)


def _fitting(header: ModelHeader, options: RunOptions, slots: int, most: int, on_gpu: bool) -> int:
    """The longest context up to `most`, in steps of 256, whose cache fits beside the weights; at
    least 512 is tried.
    """
    free = devices.free_gpu_bytes() if on_gpu else host.available_memory()
    form = _shape(header, options)
    if free is None or form is None:
        return most
    left = free - header.tensor_bytes - SPARE - _output_bytes(header, slots)
    size = most

    def needed(cells: int) -> int:
        types = options.cache_type_k, options.cache_type_v
        return kv_size.predict_cache(
            form, cells, *types, n_ubatch=options.ubatch_size, n_seq_max=slots
        ).nbytes

    while size > 512 and needed(size) > left:
        size -= kv_size.CELL_STEP
    return size


def _shape(header: ModelHeader, options: RunOptions) -> kv_size.CacheShape | None:
    form = kv_size.read_shape(header.metadata)
    return kv_size.without_windows(form) if form and options.reproducible else form


def _output_bytes(header: ModelHeader, slots: int) -> int:
    """The logits of every sequence beyond the first, whose row SPARE has room for."""
    return 4 * _words(header) * (slots - 1)


def _words(header: ModelHeader) -> int:
    return next(
        (tensor.shape[-1] for tensor in header.tensors if tensor.name == "token_embd.weight"), 0
    )


def _gpu_layers(header: ModelHeader, options: RunOptions) -> int:
    wish = options.gpu_layers.strip().lower()
    if wish == "all":
        return -1
    if wish != "auto":
        if not re.fullmatch(r"-?[0-9]{1,6}", wish):
            raise UserError(
                f"--gpu-layers is {options.gpu_layers!r}",
                hint="-ngl takes a number of layers, auto or all",
            )
        return int(wish)
    free = devices.free_gpu_bytes()
    if free is None:
        return 0  # no GPU in this build or machine
    layers = int(header.get_int(f"{header.architecture}.block_count") or 1)
    share = (free - SPARE) * 0.9 / max(1, header.tensor_bytes)
    return -1 if share >= 1 else max(0, int(layers * share))
