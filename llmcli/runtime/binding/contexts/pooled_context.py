"""A context for embeddings. Its passes give one vector per text, pooled over the text's tokens,
instead of logits per token. It shares the model's weights with the context that generates text.

llama.cpp has two kinds of models (src/llama-context.cpp, encode and decode). A model with a cache
and causal attention can read a text in several passes. A model without a cache, or with
bidirectional attention, must read a text in one pass of one micro-batch. llama.cpp aborts the
process when these rules are broken, so they are checked here first.
"""

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmcli.errors import UserError
from llmcli.runtime.binding import contract
from llmcli.runtime.binding.contexts.cache_types import FLASH_MODES, KV_TYPES, check_cache_types
from llmcli.runtime.binding.contexts.context import Context
from llmcli.runtime.binding.contexts.context_options import MAX_SEQUENCES
from llmcli.runtime.binding.kernels import gemm
from llmcli.runtime.binding.kv_state.positions import Positions, batch_spans, min_max
from llmcli.runtime.binding.library import last_log_lines, lib, reset_log
from llmcli.runtime.binding.memory_breakdown import MemoryBreakdown, read_memory_breakdown
from llmcli.runtime.binding.model import Model
from llmcli.runtime.binding.rows.batch import Batch, BatchRows, reserved_outputs

POOLING = {
    kind: contract.CONSTANTS[f"LLAMA_POOLING_TYPE_{kind.upper()}"]
    for kind in ("none", "mean", "cls", "last", "rank")
}

Vector = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class PooledOptions:
    """Settings of a pooled context.

    - `n_ctx`: maximum tokens of all texts that are read together.
    - `pass_tokens`: maximum tokens of a pass.
    - `max_texts`: maximum number of texts that are read together.
    - `max_vector_rows`: maximum tokens of a pass that gives vectors. llama.cpp reserves a row of
      output for each of them.
    - `gemm_min_rows`: as in ContextOptions.
    - `pooling`: "mean", "cls", "last" or "rank"; "none" gives a vector for each token.
    """

    n_ctx: int
    pass_tokens: int
    max_texts: int
    max_vector_rows: int
    pooling: str
    n_threads: int = 1
    n_threads_batch: int = 1
    type_k: str = "f16"
    type_v: str = "f16"
    flash_attn: str = "auto"
    gemm_min_rows: int = 0


def is_causal(model: Model, context: Context) -> bool:
    """Return whether the model can read a text in several passes. This needs a cache and causal
    attention.

    A model with an encoder and a decoder counts as not causal: its context has a cache, but the
    cache belongs to the decoder.
    """
    library = lib()
    encodes = library.llama_model_has_encoder(model.pointer)
    return (
        bool(context.memory)
        and not encodes
        and bool(library.llama_get_causal_attn(context.pointer))
    )


class PooledContext:
    """An open context for embeddings. Made by `open_pooled_context`, and unusable after its `with`
    block.
    """

    def __init__(
        self,
        pointer: Any,
        model: Model,
        options: PooledOptions,
        begin_pass: Callable[[], None] | None,
    ) -> None:
        """`begin_pass`: a function to call before each pass (gemm.registered)."""
        library = lib()
        self._pointer, self._options = pointer, options
        self._memory = library.llama_get_memory(pointer)
        self.n_vocab = model.n_vocab
        self.n_ctx: int = library.llama_n_ctx(pointer)
        # for a reranking model, the number of scores (src/llama-context.cpp,
        # LLAMA_POOLING_TYPE_RANK)
        self.vector_size: int = (
            library.llama_model_n_cls_out(model.pointer)
            if options.pooling == "rank"
            else model.n_embd
        )
        self._batch, self._positions = Batch(options.pass_tokens), Positions(options.max_texts)
        self._encodes = library.llama_model_has_encoder(model.pointer)
        self._cached_tokens = 0
        self._begin_pass = begin_pass

    def clear(self) -> None:
        """Drop all texts from the cache. This must be done before the first tokens of new texts."""
        lib().llama_memory_clear(self._memory, False)  # has no effect without a memory
        self._positions.clear()
        self._cached_tokens = 0

    def read(self, rows: BatchRows) -> None:
        """Run a pass that only fills the cache with the next tokens of some texts. A sequence id in
        `rows` is the number of a text, and no row may ask for output. The model must be causal.
        """
        assert self._memory, "this model must read a text in one pass"
        assert not any(rows.wants_logits), "read gives no vectors"
        self._forward(rows, vectors=False)

    def compute_vectors(self, rows: BatchRows) -> dict[int, Vector]:
        """Run a pass over the last tokens of some texts, and return their vectors.

        A sequence id in `rows` is the number of a text, and every row must ask for output. The
        result maps each number to the text's pooled vector, float32 `[vector_size]`, which is not
        normalized. With pooling "none" it maps each number to the vectors of the text's rows,
        float32 `[rows, vector_size]`.

        Raises UserError when llama.cpp fails; the cache is empty then.
        """
        assert len(rows) <= self._options.max_vector_rows and all(rows.wants_logits), (
            len(rows),
            self._options.max_vector_rows,
        )
        self._forward(rows, vectors=True)
        if self._options.pooling == "none":
            return self._token_vectors(rows)
        views = {}
        for sequence in dict.fromkeys(rows.sequences):
            pointer = lib().llama_get_embeddings_seq(self._pointer, sequence)
            assert pointer, f"text {sequence} has no vector"
            views[sequence] = np.ctypeslib.as_array(
                ctypes.cast(pointer, ctypes.POINTER(ctypes.c_float)), (self.vector_size,)
            )
        return {sequence: vector.copy() for sequence, vector in views.items()}

    def _token_vectors(self, rows: BatchRows) -> dict[int, Vector]:
        """Return the vectors of the last pass by the number of their text, float32
        `[rows, vector_size]`.
        """
        vectors: dict[int, list[Vector]] = {}
        for row, sequence in enumerate(rows.sequences):
            pointer = lib().llama_get_embeddings_ith(self._pointer, row)
            assert pointer, f"row {row} has no vector"
            view = np.ctypeslib.as_array(
                ctypes.cast(pointer, ctypes.POINTER(ctypes.c_float)), (self.vector_size,)
            )
            vectors.setdefault(sequence, []).append(view.copy())
        return {sequence: np.stack(text) for sequence, text in vectors.items()}

    def memory_breakdown(self) -> MemoryBreakdown | None:
        """Return the bytes of this context and of its model. Return None when this build of
        llama.cpp does not report them.
        """
        return read_memory_breakdown(self._pointer)

    def _forward(self, rows: BatchRows, vectors: bool) -> None:
        count = len(rows)
        assert 0 < count <= self._options.pass_tokens, (count, self._options.pass_tokens)
        assert self._cached_tokens + count <= self.n_ctx, (self._cached_tokens, count, self.n_ctx)
        low, high = min_max(rows.tokens)
        assert low >= 0 and high < self.n_vocab, "token outside the vocabulary"
        low, high = min_max(rows.sequences)
        assert low >= 0 and high < self._options.max_texts, "text out of range"
        added = batch_spans(rows.positions, rows.sequences)
        self._positions.check(added)
        self._batch.fill(rows)
        library = lib()
        library.llama_set_embeddings(self._pointer, vectors)
        reset_log()
        if self._begin_pass:
            self._begin_pass()
        forward = library.llama_encode if self._encodes else library.llama_decode
        code = forward(self._pointer, self._batch.struct)
        if code:
            self.clear()
            reason = last_log_lines() or "no reason given"
            raise UserError(
                f"llama.cpp could not embed this batch (code {code}): {reason}",
                hint="try shorter texts",
            )
        self._positions.advance(added)
        self._cached_tokens += count if self._memory else 0


@contextmanager
def open_pooled_context(model: Model, options: PooledOptions) -> Iterator[PooledContext]:
    """Open a context for embeddings of `model`.

    Raises UserError when llama.cpp refuses the settings, and for a model with both an encoder and a
    decoder.
    """
    with _open_pointer(model, options) as (pointer, begin_pass):
        yield PooledContext(pointer, model, options, begin_pass)


@contextmanager
def _open_pointer(
    model: Model, options: PooledOptions
) -> Iterator[tuple[Any, Callable[[], None] | None]]:
    """Check the settings, and yield a pointer to a new llama_context, which is freed at the end,
    and the function to call before each of its passes.
    """
    check_cache_types(options.type_k, options.type_v, options.flash_attn)
    assert 1 <= options.max_texts <= MAX_SEQUENCES, options.max_texts
    assert options.pooling in POOLING, options.pooling
    # llama.cpp computes a mean as a matrix product over all rows of a pass. It reserves the graph
    # of the largest pass in advance, so all rows of that pass must fit into the output.
    assert options.pooling != "mean" or options.max_vector_rows >= max(
        options.pass_tokens, options.max_texts
    ), options
    library = lib()
    if library.llama_model_has_encoder(model.pointer) and library.llama_model_has_decoder(
        model.pointer
    ):
        raise UserError(
            "llama.cpp has no embeddings for a model with an encoder and a decoder",
            hint="use another model",
        )
    params = library.llama_context_default_params()
    rows = max(options.pass_tokens, options.max_texts)  # a pass is one micro-batch
    contract.set_fields(
        params,
        n_ctx=max(options.n_ctx, options.pass_tokens),
        n_batch=rows,
        n_ubatch=rows,
        n_seq_max=options.max_texts,
        # in a pass with vectors every row is an output
        n_outputs_max=reserved_outputs(max(options.max_texts, options.max_vector_rows)),
        n_threads=options.n_threads,
        n_threads_batch=options.n_threads_batch,
        type_k=KV_TYPES[options.type_k],
        type_v=KV_TYPES[options.type_v],
        flash_attn_type=FLASH_MODES[options.flash_attn],
        kv_unified=True,
        swa_full=False,
        no_perf=True,
        embeddings=True,
        pooling_type=POOLING[options.pooling],
    )
    reset_log()
    with gemm.registered(options.gemm_min_rows) as begin_pass:
        pointer = library.llama_init_from_model(model.pointer, params)
    if not pointer:
        reason = last_log_lines() or "not enough memory?"
        raise UserError(
            f"llama.cpp refuses a context for embeddings: {reason}",
            hint="try shorter texts, or --cache-type-k f16 --cache-type-v f16",
        )
    try:
        yield pointer, begin_pass
    finally:
        library.llama_free(pointer)
