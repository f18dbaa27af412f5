"""Compute an upper bound of the memory of a run from the header of its GGUF file, in less than a
millisecond.

If the bound is at most the available memory, the run surely fits, and no dry run is needed. (A dry
run is slower, because it reads the vocabulary.) The bound assumes the worst: all weights are copied
to another layout, attention scores are stored, and activations are wide.
"""

from llmcli.planning.prediction.cache_layout import cache_bytes_by_layer, predict_attention_cache
from llmcli.runtime import kv_size
from llmcli.runtime.binding.contexts.context_options import ContextOptions
from llmcli.runtime.binding.rows.batch import reserved_outputs
from quant.model_file.model_header import ModelHeader

CELL_NOTE_BYTES = 128  # bytes that llama.cpp uses per cell besides K and V
# assumed number of activations stored per token, each as wide as the widest weight matrix
ACTIVATION_ROWS = 12
# size of repacked weights relative to those in the file; above 1, because AMX adds padding
REPACKED_RATIO = 1.25


def upper_bound_bytes(header: ModelHeader, options: ContextOptions) -> int:
    """Return an upper bound of the bytes that a model and a context with these options take:
    weights (mapped and repacked), KV cache, and compute and output buffers.
    """
    return (
        int(header.tensor_bytes * (1 + REPACKED_RATIO))
        + _cache_bytes(header, options)
        + buffer_bytes(header, options)
    )


def predict_cache(header: ModelHeader, options: ContextOptions) -> kv_size.KVCache | None:
    """Return the exact size of the KV cache, layer by layer. Return None if the size cannot be
    predicted for this model.
    """
    cache_shape = kv_size.read_shape(header.metadata)
    return predict_attention_cache(cache_shape, options) if cache_shape else None


def _cache_bytes(header: ModelHeader, options: ContextOptions) -> int:
    """Return the bytes of the KV cache and of recurrent states. If they cannot be predicted, return
    an upper bound: in each layer, keys and values of 32-bit numbers that are as wide as the widest
    weight matrix.
    """
    by_layer = cache_bytes_by_layer(header, options)
    if by_layer is not None:
        return sum(by_layer)
    layers, widest = header.get_int("block_count") or 1, _max_row_values(header)
    # assume recurrent state in every layer, even if the header mentions none
    state = header.get_int("ssm.state_size") or 256
    return (
        4
        * layers
        * widest
        * (2 * kv_size.round_up_cells(options.n_ctx) + state * options.n_seq_max)
    )


def buffer_bytes(header: ModelHeader, options: ContextOptions) -> int:
    """Return an upper bound of the bytes of the compute and output buffers, and of llama.cpp's
    bookkeeping for the cells.
    """
    n_vocab = next(
        (tensor.shape[-1] for tensor in header.tensors if tensor.name == "token_embd.weight"), 0
    )
    outputs = reserved_outputs(max(options.n_outputs, options.n_sequences))
    rows, cells = min(options.n_ubatch, options.n_batch), kv_size.round_up_cells(options.n_ctx)
    heads = header.get_int("attention.head_count") or 1
    scores = rows * cells * (8 * heads + 12)  # the scores as 32-bit floats, and a mask in two types
    return (
        scores
        + 4 * rows * ACTIVATION_ROWS * _max_row_values(header)
        + 12 * n_vocab * outputs
        + CELL_NOTE_BYTES * cells
    )


def _max_row_values(header: ModelHeader) -> int:
    """Return the largest number of values that a weight matrix reads or writes for one token. For a
    tensor of several experts, this is the sum over the experts that a token uses.
    """
    used = max(1, header.get_int("expert_used_count") or 1)
    rows = [
        max(tensor.shape[0], tensor.shape[1]) * (used if len(tensor.shape) > 2 else 1)
        for tensor in header.tensors
        if len(tensor.shape) > 1 and tensor.name not in ("token_embd.weight", "output.weight")
    ]
    return max(rows, default=1)
