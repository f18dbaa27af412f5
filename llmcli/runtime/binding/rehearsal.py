"""Loads a GGUF file as a run would, and computes a few tokens, to see whether llama.cpp survives
it. This is done in a process that may end: llama.cpp aborts or loops on some damaged files.
"""

import ctypes
from pathlib import Path

from llmcli.runtime.binding.context import Context
from llmcli.runtime.binding.context_options import ContextOptions
from llmcli.runtime.binding.library import lib
from llmcli.runtime.binding.model import Model, open_model
from llmcli.runtime.binding.open_context import open_context

MAX_CTX = 8192  # the largest context that a run has by default
SEQUENCES = (1, 4)  # numbers of sequences: those of `run`, and those of `serve` by default
PASS_TOKENS = 2  # of the first pass; the second pass has one token
# Text of several kinds of characters, and the beginning and end of a control token.
PROBE_TEXT = "Once upon a time: 12.5 °C, 你好 <|im_start|>\n\t<s>"


def rehearse_layout(path: Path, threads: int) -> tuple[str, str]:
    """Load a file without its weights, tokenize a text, and build the graphs of a pass, as a dry
    run. Return the texts of the BOS and the EOS token, for a chat template.

    Raises UserError if llama.cpp refuses the file or the context.
    """
    with open_model(path, gpu_layers=0, dry_run=True) as model:
        texts = _probe_vocabulary(model)
        # a damaged file may have a negative length
        n_ctx = model.n_ctx_train if 0 < model.n_ctx_train < MAX_CTX else MAX_CTX
        for n_seq_max in SEQUENCES:
            options = ContextOptions(
                n_ctx,
                n_seq_max=n_seq_max,
                n_threads=threads,
                n_threads_batch=threads,
            )
            with open_context(model, options):
                pass
    return texts


def rehearse_pass(path: Path, threads: int) -> None:
    """Load a file with its weights, and compute two passes on the CPU. The weights stay mapped: a
    repacked copy of them would take memory and time.

    Raises UserError if llama.cpp refuses the file or the context. A pass that it refuses is no
    error, because it has survived.
    """
    with open_model(path, gpu_layers=0, repack=False) as model:
        options = ContextOptions(
            256, PASS_TOKENS, PASS_TOKENS, 1, threads, threads, n_outputs=PASS_TOKENS
        )
        if not model.n_vocab:
            return
        with open_context(model, options) as context:
            for count in (PASS_TOKENS, 1):
                _compute_pass(model, context, count)


def _probe_vocabulary(model: Model) -> tuple[str, str]:
    """Tokenize a text and convert the tokens back. Return the texts of BOS and EOS."""
    for special in (False, True):
        for token in model.tokenize(PROBE_TEXT, special=special, add_special=special):
            model.piece(token, special=special)
    return model.token_text(model.bos), model.token_text(model.eos)


def _compute_pass(model: Model, context: Context, count: int) -> None:
    """Compute a pass of `count` tokens after those of earlier passes. llama.cpp sets the
    positions.
    """
    library = lib()
    first = model.bos if model.bos is not None else 0
    tokens = (ctypes.c_int32 * count)(*[min(first, model.n_vocab - 1)] * count)
    batch = library.llama_batch_get_one(tokens, count)
    if library.llama_model_has_encoder(model.pointer) or not context.memory:
        library.llama_set_embeddings(context.pointer, True)
        library.llama_encode(context.pointer, batch)
    elif library.llama_model_has_decoder(model.pointer):
        library.llama_decode(context.pointer, batch)
    library.llama_synchronize(context.pointer)
