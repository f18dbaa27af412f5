"""An upper bound of a run's memory, computed from the file's header in well under a millisecond.

If more memory than this is available, no dry run is needed, which takes as long as reading the
vocabulary. The bound is generous: it assumes a repacked copy of the weights, stored attention
scores and wide activations.
"""

from llmcli.runtime import kv_size
from llmcli.runtime.binding.batch import reserved_outputs
from llmcli.runtime.binding.context_options import ContextOptions
from quant.model_file.model_header import ModelHeader

CELL_NOTE_BYTES = 128  # bytes per cell of llama.cpp's own bookkeeping
ACTIVATION_ROWS = 12  # rows as wide as the widest matrix that exist at a time
REPACKED_RATIO = 1.25  # size of repacked weights relative to the original; AMX adds padding


def upper_bound_bytes(header: ModelHeader, options: ContextOptions) -> int:
    """Return an upper bound in bytes of weights (mapped and repacked), KV cache, compute and output
    buffers.
    """
    return (
        int(header.tensor_bytes * (1 + REPACKED_RATIO))
        + _cache(header, options)
        + _compute(header, options)
    )


def predict_cache(header: ModelHeader, options: ContextOptions) -> kv_size.KVCache | None:
    """Return the exact KV cache; None if its rules are unknown."""
    cache_shape = kv_size.read_shape(header.metadata)
    if cache_shape is None:
        return None
    return kv_size.predict_cache(
        kv_size.without_windows(cache_shape) if options.swa_full else cache_shape,
        options.n_ctx,
        options.type_k,
        options.type_v,
        n_ubatch=options.n_ubatch,
        n_seq_max=options.n_seq_max,
        flash=options.flash_attn != "off",
        unified=options.unified,
    )


def _cache(header: ModelHeader, options: ContextOptions) -> int:
    """Return the bytes of the cache, or an upper bound for this number of layers: as many key heads
    as query heads, 32 bits per value.
    """
    exact = predict_cache(header, options)
    if exact:
        return exact.nbytes
    layers, widest = header.get_int("block_count") or 1, _widest(header)
    # recurrent state is stored once per sequence, whatever the header says
    state = header.get_int("ssm.state_size") or 256
    return (
        4
        * layers
        * widest
        * (2 * kv_size.round_up_cells(options.n_ctx) + state * options.n_seq_max)
    )


def _compute(header: ModelHeader, options: ContextOptions) -> int:
    n_vocab = next(
        (tensor.shape[-1] for tensor in header.tensors if tensor.name == "token_embd.weight"), 0
    )
    outputs = reserved_outputs(max(options.n_outputs, options.n_sequences))
    rows, cells = min(options.n_ubatch, options.n_batch), kv_size.round_up_cells(options.n_ctx)
    heads = header.get_int("attention.head_count") or 1
    scores = rows * cells * (8 * heads + 12)  # floats, and a mask in two types
    return (
        scores
        + 4 * rows * ACTIVATION_ROWS * _widest(header)
        + 12 * n_vocab * outputs
        + CELL_NOTE_BYTES * cells
    )


def _widest(header: ModelHeader) -> int:
    """Return the values of a token's widest row over all matrices. Expert matrices count once for
    each used expert.
    """
    used = max(1, header.get_int("expert_used_count") or 1)
    rows = [
        max(tensor.shape[0], tensor.shape[1]) * (used if len(tensor.shape) > 2 else 1)
        for tensor in header.tensors
        if len(tensor.shape) > 1 and tensor.name not in ("token_embd.weight", "output.weight")
    ]
    return max(rows, default=1)
