"""Opens a llama.cpp context for a model, with checked settings."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from llmcli.errors import UserError
from llmcli.runtime.binding.contexts.cache_types import FLASH_MODES, KV_TYPES, check_cache_types
from llmcli.runtime.binding.contexts.context import Context
from llmcli.runtime.binding.contexts.context_options import MAX_SEQUENCES, ContextOptions
from llmcli.runtime.binding.contexts.eagle_context import EagleContext, LayerInputs
from llmcli.runtime.binding.contexts.prediction_context import PredictionContext, enable_states
from llmcli.runtime.binding.contexts.shift_support import can_shift
from llmcli.runtime.binding.contract import CONSTANTS, set_fields
from llmcli.runtime.binding.kernels import gemm
from llmcli.runtime.binding.library import last_log_lines, lib, reset_log
from llmcli.runtime.binding.model import AllocationError, Model, is_allocation_failure
from llmcli.runtime.binding.rows.batch import StopFlag, abort_callback, reserved_outputs
from llmcli.runtime.interrupt import on_interrupt

MTP = CONSTANTS["LLAMA_CONTEXT_TYPE_MTP"]


@contextmanager
def open_context(
    model: Model, options: ContextOptions, eval_callback: Any = None, stop: StopFlag | None = None
) -> Iterator[Context]:
    """Open a context for `model`, and yield it.

    `eval_callback`: a C callback that llama.cpp calls for the nodes of each graph
    (eval_callback.py). `stop`: the flag of another context, so that one request interrupts both; by
    default the context gets a new flag.

    Raises UserError for settings that llama.cpp does not support or cannot allocate, and
    KeyboardInterrupt at Ctrl-C.
    """
    with _open_pointer(model, options, eval_callback, stop) as parts:
        context = Context(*parts)
        try:
            yield context
        finally:
            context.close_pass_thread()


@contextmanager
def open_prediction_context(
    model: Model, target: Context, options: ContextOptions, eval_callback: Any = None
) -> Iterator[PredictionContext]:
    """Open a context of the prediction layers of `model`, which must have loaded them, beside its
    context `target`. Interrupting one of them interrupts both. Raises like `open_context`.
    """
    settings = {"ctx_type": MTP, "ctx_other": target.pointer}
    with _open_pointer(model, options, eval_callback, target.stop, **settings) as parts:
        enable_states(parts[0], only_outputs=True)
        yield PredictionContext(*parts)


@contextmanager
def open_eagle_context(
    model: Model, inputs: LayerInputs, options: ContextOptions
) -> Iterator[EagleContext]:
    """Open a context of the EAGLE-3 draft `model`, which reads `inputs` of its target's context. The
    target keeps them from its next pass on, until this context is closed. Interrupting one of the
    contexts interrupts both. Raises like `open_context`.
    """
    target = inputs.context
    with _open_pointer(model, options, None, target.stop, ctx_other=target.pointer) as parts:
        enable_states(parts[0], only_outputs=True)
        inputs.enable()
        try:
            yield EagleContext(inputs, *parts)
        finally:
            inputs.disable()


@contextmanager
def _open_pointer(
    model: Model,
    options: ContextOptions,
    eval_callback: Any,
    stop: StopFlag | None,
    **settings: Any,
) -> Iterator[Any]:
    """Open a context as `open_context`, with further fields of llama_context_params. Yield the
    arguments of Context.
    """
    library = lib()
    _check_options(options)
    params = library.llama_context_default_params()
    stop = stop or StopFlag()
    abort, abort_data = abort_callback(stop.flag)
    set_fields(
        params,
        n_ctx=options.n_ctx,
        n_batch=options.batch_rows,
        n_ubatch=options.n_ubatch,
        n_seq_max=options.n_sequences,
        n_rs_seq=options.usable_rs_seq,
        # llama.cpp's default would reserve a row of logits for every token of a batch
        n_outputs_max=reserved_outputs(max(options.n_sequences, options.n_outputs)),
        n_threads=options.n_threads,
        n_threads_batch=options.n_threads_batch,
        type_k=KV_TYPES[options.type_k],
        type_v=KV_TYPES[options.type_v],
        flash_attn_type=FLASH_MODES[options.flash_attn],
        offload_kqv=options.offload_kqv,
        kv_unified=options.unified,
        swa_full=options.swa_full,  # False in llama.cpp's own tools
        no_perf=True,
        abort_callback=abort,
        abort_callback_data=abort_data,
    )
    set_fields(params, **settings)
    if options.outputs_final_states:  # a model's own pooling would give a state for each sequence
        set_fields(params, pooling_type=CONSTANTS["LLAMA_POOLING_TYPE_NONE"])
    if options.swa_full:
        set_fields(params, op_offload=False, offload_kqv=False)
    if eval_callback is not None:
        set_fields(params, cb_eval=eval_callback)
    reset_log()
    interrupted = threading.Event()
    with gemm.registered(options.gemm_min_rows) as begin_pass, on_interrupt(interrupted.set):
        pointer = library.llama_init_from_model(model.pointer, params)
    if interrupted.is_set():
        if pointer:
            library.llama_free(pointer)
        raise KeyboardInterrupt
    if not pointer:
        reason = last_log_lines() or "not enough memory?"
        kind = AllocationError if is_allocation_failure(reason) else UserError
        raise kind(
            f"llama.cpp refuses this context: {reason}",
            hint="try a smaller --ctx-size, or --cache-type-k f16 --cache-type-v f16",
        )

    def decide_shift(context: Context) -> bool:
        # The reproducible mode (`swa_full`) moves no cells: moved cells still contain the influence
        # of the dropped text, so they differ from cells computed from the remaining text alone.
        return not options.swa_full and can_shift(model, context, options.type_k, open_context)

    try:
        if options.outputs_states:
            enable_states(pointer, only_outputs=False)
        yield pointer, model, stop, options, decide_shift, begin_pass
    finally:
        library.llama_free(pointer)


def _check_options(options: ContextOptions) -> None:
    """Raise UserError for cache types or a number of sequences that llama.cpp does not support."""
    check_cache_types(options.type_k, options.type_v, options.flash_attn)
    if not 1 <= options.n_seq_max <= options.n_sequences <= MAX_SEQUENCES:
        raise UserError(
            f"{options.n_seq_max} sequences at once",
            hint=f"use a number between 1 and {MAX_SEQUENCES}",
        )
