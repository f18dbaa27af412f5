"""Creates the context for embeddings if the machine has the memory for it."""

from llmcli.errors import UserError
from llmcli.hardware import host
from llmcli.runtime.runner import Runner
from llmcli.units import format_size


def open_embedding_context(runner: Runner, tokens: int) -> None:
    """Create the context for embeddings, or replace it by a larger one, if a text of `tokens`
    tokens needs this. Raises UserError if the machine has too little memory. Runs on the engine's
    thread.
    """
    embedder, kv_report = runner.embedder(), runner.kv_report()
    n_tokens = embedder.needed_cells(tokens)
    if n_tokens == embedder.n_cells:
        return
    cache = (
        runner.predict_cache(kv_report.type_k, kv_report.type_v, n_tokens)
        if embedder.is_causal
        else None
    )
    needed = (cache.nbytes if cache else 0) + (kv_report.compute_bytes or 0)
    free = host.available_memory()
    if free is not None and needed > free:
        message = f"a text of {tokens} tokens needs {format_size(needed)} of memory, {format_size(free)} are free"
        raise UserError(message, hint="use shorter texts")
    embedder.ensure_context(tokens)
