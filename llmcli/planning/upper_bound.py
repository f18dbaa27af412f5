"""A bound of what a run can take, from the header alone, in well under a millisecond.

Whoever has more memory than this need not rehearse (plan.py), which takes as long as reading the
vocabulary. It is generous on purpose: weights copied once more, attention as if its scores were
written out, wide activations.
"""

from llmcli.runtime import kv_size
from llmcli.runtime.binding.batch import reserved_outputs
from llmcli.runtime.binding.context_options import ContextOptions
from quant.model_file.model_header import ModelHeader

NOTES = 128  # bytes a cell that llama.cpp writes down about it
ACTIVATIONS = 12  # rows as wide as the widest matrix that live at once
COPY = 1.25  # of the weights, laid out anew: AMX pads a little


def bound(header: ModelHeader, options: ContextOptions) -> int:
    """Bytes that weights (mapped and copied), KV, compute and output buffers stay below."""
    return (
        int(header.tensor_bytes * (1 + COPY)) + _cache(header, options) + _compute(header, options)
    )


def cache(header: ModelHeader, options: ContextOptions) -> kv_size.KVCache | None:
    """The KV cache to the byte; None where its rules are not known."""
    form = kv_size.read_shape(header.metadata)
    if form is None:
        return None
    return kv_size.predict_cache(
        kv_size.without_windows(form) if options.swa_full else form,
        options.n_ctx,
        options.type_k,
        options.type_v,
        n_ubatch=options.n_ubatch,
        n_seq_max=options.n_seq_max,
        flash=options.flash_attn != "off",
        unified=options.unified,
    )


def _cache(header: ModelHeader, options: ContextOptions) -> int:
    """The cache, or more than any cache of this many layers: as many key heads as query heads, 32
    bits a value.
    """
    known = cache(header, options)
    if known:
        return known.nbytes
    layers, widest = header.get_int("block_count") or 1, _widest(header)
    state = (
        header.get_int("ssm.state_size") or 256
    )  # recurrent: kept once a sequence, whatever is said
    return (
        4
        * layers
        * widest
        * (2 * kv_size.round_up_cells(options.n_ctx) + state * options.n_seq_max)
    )


def _compute(header: ModelHeader, options: ContextOptions) -> int:
    words = next(
        (tensor.shape[-1] for tensor in header.tensors if tensor.name == "token_embd.weight"), 0
    )
    outputs = reserved_outputs(max(options.n_outputs, options.n_sequences))
    rows, cells = min(options.n_ubatch, options.n_batch), kv_size.round_up_cells(options.n_ctx)
    heads = header.get_int("attention.head_count") or 1
    scores = rows * cells * (8 * heads + 12)  # of floats, and a mask in two types
    return scores + 4 * rows * ACTIVATIONS * _widest(header) + 12 * words * outputs + NOTES * cells


def _widest(header: ModelHeader) -> int:
    """Values of a token's widest row: of the matrices, those of the experts counted as often as
    they are chosen.
    """
    used = max(1, header.get_int("expert_used_count") or 1)
    rows = [
        max(tensor.shape[0], tensor.shape[1]) * (used if len(tensor.shape) > 2 else 1)
        for tensor in header.tensors
        if len(tensor.shape) > 1 and tensor.name not in ("token_embd.weight", "output.weight")
    ]
    return max(rows, default=1)
