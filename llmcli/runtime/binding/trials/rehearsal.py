"""Loads a GGUF file as a run would, and computes a few tokens, to see whether llama.cpp survives
it. This is done in a process that may end: llama.cpp aborts or loops on some damaged files.

The process starts for every new file, so numpy is not imported here.
"""

import ctypes
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from llmcli.errors import UserError
from llmcli.runtime.binding.contract import set_fields
from llmcli.runtime.binding.library import last_log_lines, lib, registry_lock, reset_log
from llmcli.runtime.binding.model import Model, open_model
from llmcli.runtime.binding.placement.model_placement import ON_HOST

MAX_CTX, MICRO_BATCH = 8192, 512  # the largest context and the micro-batch of a run by default
SEQUENCES = (1, 4)  # numbers of sequences: those of `run`, and those of `serve` by default
PASS_CTX = 256  # cells of the context that computes tokens
# Tokens of the passes, for a small file and for a large one, whose every pass takes long.
SMALL_BYTES = 256 << 20
SMALL_PASSES, LARGE_PASSES = (2, 1), (1,)
NUMBERS_HINT = "check the weights of the checkpoint, or pull a GGUF of this model instead"
# Text of several kinds of characters, and the beginning and end of a control token.
PROBE_TEXT = "Once upon a time: 12.5 °C, 你好 <|im_start|>\n\t<s>"


def rehearse_layout(path: Path, threads: int, *, latent: bool) -> tuple[str, str]:
    """Load a file without its weights, tokenize a text, and build the graphs of a pass, as a dry
    run. Return the texts of the BOS and the EOS token, for a chat template. `latent`: whether the
    model has latent attention.

    Raises UserError if llama.cpp refuses the file or the context.
    """
    with open_model(path, replace(ON_HOST, latent=latent), dry_run=True) as model:
        texts = _probe_vocabulary(model)
        # a damaged file may have a negative length
        n_ctx = model.n_ctx_train if 0 < model.n_ctx_train < MAX_CTX else MAX_CTX
        for n_seq_max in SEQUENCES:
            with _open_context(model, n_ctx, MICRO_BATCH, n_seq_max, threads):
                pass
    return texts


def rehearse_pass(
    path: Path, threads: int, *, latent: bool, requires_numbers: bool = False
) -> None:
    """Load a file with its weights, and compute some tokens on the CPU. The weights stay mapped: a
    repacked copy of them would take memory and time.

    Raises UserError if llama.cpp refuses the file or the context. A pass that it refuses is no
    error, because it has survived, unless `requires_numbers` is set: then every logit must be a
    finite number, and one that is not raises UserError, too.
    """
    with open_model(path, replace(ON_HOST, latent=latent, repack=False)) as model:
        passes = SMALL_PASSES if model.nbytes < SMALL_BYTES else LARGE_PASSES
        if not model.n_vocab:
            return
        with _open_context(model, PASS_CTX, max(passes), 1, threads) as context:
            for count in passes:
                is_embedding = _compute_pass(model, context, count)
                if requires_numbers:
                    _require_numbers(model, context, is_embedding)


def _probe_vocabulary(model: Model) -> tuple[str, str]:
    """Tokenize a text and convert the tokens back. Return the texts of BOS and EOS."""
    for special in (False, True):
        for token in model.tokenize(PROBE_TEXT, special=special, add_special=special):
            model.piece(token, special=special)
    return model.token_text(model.bos), model.token_text(model.eos)


@contextmanager
def _open_context(
    model: Model, n_ctx: int, n_ubatch: int, n_seq_max: int, threads: int
) -> Iterator[Any]:
    """Open a context with llama.cpp's default settings, as a run has them."""
    library = lib()
    params = library.llama_context_default_params()
    set_fields(
        params,
        n_ctx=n_ctx,
        n_batch=n_ubatch,
        n_ubatch=n_ubatch,
        n_seq_max=n_seq_max,
        n_outputs_max=max(n_seq_max, *SMALL_PASSES),
        n_threads=threads,
        n_threads_batch=threads,
        kv_unified=True,
        no_perf=True,
        swa_full=False,
    )
    reset_log()
    with registry_lock:
        pointer = library.llama_init_from_model(model.pointer, params)
    if not pointer:
        reason = last_log_lines() or "not enough memory?"
        raise UserError(f"llama.cpp refuses a context of {model.path.name}: {reason}")
    try:
        yield pointer
    finally:
        library.llama_free(pointer)


def _compute_pass(model: Model, context: Any, count: int) -> bool:
    """Compute a pass of `count` tokens after those of earlier passes. llama.cpp sets the positions.
    Return whether its result is an embedding instead of logits.
    """
    library = lib()
    first = model.bos if model.bos is not None else 0
    tokens = (ctypes.c_int32 * count)(*[min(first, model.n_vocab - 1)] * count)
    batch = library.llama_batch_get_one(tokens, count)
    is_encoder = library.llama_model_has_encoder(model.pointer)
    if is_embedding := bool(is_encoder or not library.llama_get_memory(context)):
        library.llama_set_embeddings(context, True)
        library.llama_encode(context, batch)
    elif library.llama_model_has_decoder(model.pointer):
        library.llama_decode(context, batch)
    library.llama_synchronize(context)
    return is_embedding


def _require_numbers(model: Model, context: Any, is_embedding: bool) -> None:
    """Raise UserError if the last pass has no result, or one that is not a finite number."""
    library = lib()
    if is_embedding:
        # with pooling, there is one row for the sequence instead of one for each token
        row = library.llama_get_embeddings_seq(context, 0) or library.llama_get_embeddings_ith(
            context, -1
        )
        size = library.llama_model_n_embd(model.pointer)
    else:
        row, size = library.llama_get_logits_ith(context, -1), model.n_vocab
    if not row:
        raise UserError(f"llama.cpp computes nothing with {model.path.name}", NUMBERS_HINT)
    if not all(map(math.isfinite, row[:size])):
        raise UserError(
            f"llama.cpp computes NaN or infinite numbers with {model.path.name}", NUMBERS_HINT
        )
