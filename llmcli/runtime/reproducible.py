"""The mode --reproducible: the same tokens give the same logits, bit for bit, whatever else is in
the batch.

llama.cpp chooses among several kernels for a matrix product by the number of tokens in a pass. The
kernels round differently. Because the inputs of products are quantized, a difference in the last
bit can grow to half a logit. The logits of a token do not depend on the batch with

- quantized weights. All kernels sum them in the same order, except for k-quants that ggml repacks on
  CPUs without AMX, and for its tiled kernels of k-quants from eight tokens on. llmcli's own products
  (kernels/products.py) have one order only.
- a q8_0 KV cache with flash attention. llama.cpp has a single method for it, but three for f16.
- cells in the order of the tokens. So a sliding window keeps all cells, and no cell in the middle
  of a sequence is reused.

Other machines have other kernels, so every model is tested when it is loaded.

Recurrent state is computed differently for one token than for several, and so are the float weights
that choose experts. Such models compute every token in a micro-batch of its own. There is one
exception: llama.cpp puts a token of each of two sequences with recurrent state into one micro-batch,
whatever its size (split_equal in src/llama-batch.cpp). With quantized weights both have the same
logits as alone. With float weights they do not, so a context with several sequences is also tested
with two of them in a pass.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from llmcli import config
from llmcli.errors import UserError
from llmcli.runtime import kv_size
from llmcli.runtime.binding.contexts.context import Context
from llmcli.runtime.binding.contexts.context_options import ContextOptions
from llmcli.runtime.binding.contexts.open_context import open_context
from llmcli.runtime.binding.kernels import products
from llmcli.runtime.binding.model import Model, open_model
from llmcli.runtime.binding.placement.amx import repacks_weights
from llmcli.runtime.binding.placement.model_placement import ON_HOST, ModelPlacement
from llmcli.runtime.binding.rows.batch import BatchRows
from llmcli.runtime.requests.request import RunOptions
from quant.model_file.model_header import ModelHeader
from quant.model_file.product_weights import float_weights, multiplied_weights

CACHE_TYPE = "q8_0"
REQUIRED_OPTIONS = {
    "cache_type_k": CACHE_TYPE,
    "cache_type_v": CACHE_TYPE,
    "flash_attn": "on",
    "gpu_layers": "0",
    "gemm": "ggml",
}
GUARANTEE = (
    "reproducible: the same prompt and seed give the same text for any batch size, number of "
    "threads and cache content; not on another CPU, build or GPU"
)
TOKEN_BY_TOKEN = "reproducible: this model has recurrent state or experts, so its prompts are read token by token"
# state-space layers, short convolutions (LFM2), RWKV, and the choice of experts
SINGLE_TOKEN_TENSOR = re.compile(r"blk\.\d+\.(ssm_|shortconv|time_mix|ffn_gate_inp)")
# Types whose layout of ggml (AVX, NEON or RVV) gives other sums for four tokens at once than for
# single tokens, or for which this was not measured.
ROW_DEPENDENT_TYPES = ("Q4_K", "Q2_K", "Q3_K", "Q5_K", "Q6_K", "IQ4_NL", "MXFP4")
# The test of a loaded model computes this many tokens, one by one and in passes of these sizes.
# llama.cpp changes the kernel at eight tokens for k-quants, and at two and four for other types.
TRIAL_TOKENS = 9
TRIAL_SPLITS = ((9,), (2, 7), (4, 5), (8, 1))


def with_required_options(options: RunOptions) -> RunOptions:
    """Return the options with the values that --reproducible requires. They replace the user's
    values, so the caller must first refuse a conflicting choice.
    """
    required: Any = REQUIRED_OPTIONS
    return replace(options, reproducible=True, **required)


def check_model(header: ModelHeader) -> None:
    """Raise UserError for a model that --reproducible cannot support: one with float weights, or
    one that cannot use a q8_0 KV cache. Float weights are no problem where tokens are computed one
    by one.
    """
    if not computes_single_tokens(header):
        _refuse_float_weights(header)
    kv_size.check_cache(header.metadata, CACHE_TYPE, CACHE_TYPE, reproducible=True)


def _refuse_float_weights(header: ModelHeader) -> None:
    """Raise UserError if weights of matrix products are floats."""
    multiplied, floats = multiplied_weights(header), float_weights(header)
    if floats:
        first, mostly_floats = floats[0], 2 * len(floats) > len(multiplied)
        description = f"{first.name} is {first.type}" + (
            f", as are {len(floats) - 1} more" if len(floats) > 1 else ""
        )
        raise UserError(
            f"--reproducible needs quantized weights: {description}, and floats round differently "
            "in batches",
            hint=f"llmcli quantize '{header.path}' --q8_0"
            if mostly_floats
            else "leave out --reproducible for this model",
        )


def computes_single_tokens(header: ModelHeader) -> bool:
    """Return whether a model needs a micro-batch for every token, because it has recurrent state or
    experts that float weights choose.
    """
    return any(SINGLE_TOKEN_TENSOR.match(tensor.name) for tensor in header.tensors)


@contextmanager
def open_reproducible(
    header: ModelHeader, options: ContextOptions, placement: ModelPlacement = ON_HOST
) -> Iterator[tuple[Model, Context]]:
    """Open a model and a context in which the logits of a token do not depend on the other tokens
    of the pass.

    The weights are repacked for speed if the test passes with repacked weights, and otherwise stay
    as they are in the file. `placement`: one without devices. Raises UserError when the test fails
    with both.
    """
    config.disable_tiled_kernels()
    can_repack = placement.repack and (
        products.is_available()
        or repacks_weights()
        or not any(tensor.type in ROW_DEPENDENT_TYPES for tensor in header.tensors)
    )
    if computes_single_tokens(header):
        options = replace(options, n_ubatch=1)
    for repack in (True, False) if can_repack else (False,):
        opened = open_model(header.path, replace(placement, repack=repack).for_header(header))
        with opened as model, open_context(model, replace(options, swa_full=True)) as context:
            if is_batch_invariant(context):
                yield model, context
                return
    several = computes_single_tokens(header) and options.n_seq_max > 1
    raise UserError(
        "on this machine this model's logits depend on how many tokens are computed at once",
        hint="use --parallel 1, or leave out --reproducible"
        if several
        else "leave out --reproducible",
    )


def is_batch_invariant(context: Context) -> bool:
    """Return whether TRIAL_TOKENS tokens give bit for bit the same logits one by one, in passes of
    several tokens and, if the context has several sequences, in passes with a token of a second
    sequence. The context must be empty. It is empty after the call.
    """
    n_tokens = min(TRIAL_TOKENS, context.n_ctx - 1)
    tokens = [(7 + 101 * index) % context.n_vocab for index in range(n_tokens)]
    one_by_one = (1,) * len(tokens)
    single_logits = _compute_last_logits(context, tokens, one_by_one)
    if context.n_seq_max > 1:
        together = _compute_last_logits(context, tokens, one_by_one, n_sequences=2)
        if together != single_logits:
            return False
    return all(
        _compute_last_logits(context, tokens, split) == single_logits
        for split in TRIAL_SPLITS
        if max(split) <= context.n_batch
    )


def _compute_last_logits(
    context: Context, tokens: list[int], split: tuple[int, ...], n_sequences: int = 1
) -> bytes:
    """Compute the tokens in passes of the sizes in `split`. With `n_sequences` 2 every pass also
    computes as many tokens of a second sequence, which has the tokens in reverse. Return the logits
    of the last token as bytes, because bytes also compare NaN and the sign of 0.
    """
    context.clear()
    texts = (tokens, tokens[::-1])[:n_sequences]
    start = 0
    logits = b""
    for count in split:
        end = start + count
        rows = context.decode(
            BatchRows(
                [token for text in texts for token in text[start:end]],
                [*range(start, end)] * n_sequences,
                [sequence for sequence in range(n_sequences) for _ in range(count)],
                [index == count - 1 for index in range(count * n_sequences)],
            )
        )
        logits, start = rows[0].logits.tobytes(), end
    context.clear()
    return logits
