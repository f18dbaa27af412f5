"""The reproducible mode: the same tokens give the same logits, bit for bit, in any batch.

llama.cpp has several kernels for a product and chooses by the number of rows. The kernels round
differently, and because inputs are quantized, a different last bit can become a difference of half
a logit. A row becomes independent of its batch with

- quantized weights, whose rows are summed in the same way by all kernels, except for repacked
  k-quants without AMX and for tiled k-quants from eight rows on,
- a q8_0 cache with flash attention, for which llama.cpp has one way to compute where it has three
  for f16,
- cells in token order: no ring of a sliding window, and no holes that are filled.

Because other machines have other kernels, every model is tested before it is used.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from llmcli import config
from llmcli.errors import UserError
from llmcli.runtime import kv_size
from llmcli.runtime.binding.batch import BatchRows
from llmcli.runtime.binding.context import Context
from llmcli.runtime.binding.context_options import ContextOptions
from llmcli.runtime.binding.devices import repacks_for_amx
from llmcli.runtime.binding.model import Model, open_model
from llmcli.runtime.binding.open_context import open_context
from llmcli.runtime.requests.request import RunOptions
from quant.gguf.header import TensorInfo
from quant.model_file.model_header import ModelHeader

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
FLOAT_TYPES = ("F32", "F16", "BF16", "F64")
LOOKUP_TENSORS = (
    "token_embd.weight",
    "position_embd.weight",
    "token_types.weight",
)  # rows of these are copied, not multiplied
# Types whose repacked layout (AVX, NEON or RVV) gives other sums for four rows at once than for
# four single rows, or was not measured.
ROW_DEPENDENT_TYPES = ("Q4_K", "Q2_K", "Q3_K", "Q5_K", "Q6_K", "IQ4_NL", "MXFP4")
TRIAL_TOKENS = (
    # number of tokens in the trial: k-quants change their kernel at eight rows, other types at two
    # and four
    9
)
TRIAL_SPLITS = ((9,), (2, 7), (4, 5), (8, 1))


def with_required_options(options: RunOptions) -> RunOptions:
    """Return the options with the values that the reproducible mode requires. The caller must have
    refused conflicting choices already.
    """
    chosen: Any = REQUIRED_OPTIONS
    return replace(options, reproducible=True, **chosen)


def check_model(header: ModelHeader) -> None:
    """Raise UserError when the logits of this model depend on the batch with any options."""
    multiplied = [tensor for tensor in header.tensors if _multiplied(tensor, header)]
    floats = [tensor for tensor in multiplied if tensor.type in FLOAT_TYPES]
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
    kv_size.check_cache(header.metadata, CACHE_TYPE, CACHE_TYPE, reproducible=True)


def _multiplied(tensor: TensorInfo, header: ModelHeader) -> bool:
    if sum(size > 1 for size in tensor.shape) < 2 or not tensor.name.endswith(".weight"):
        return False
    tied = not any(other.name == "output.weight" for other in header.tensors)
    return tensor.name not in LOOKUP_TENSORS or (tied and tensor.name == LOOKUP_TENSORS[0])


@contextmanager
def open_reproducible(
    header: ModelHeader, options: ContextOptions
) -> Iterator[tuple[Model, Context]]:
    """Open a model and a context in which the logits of a row do not depend on its batch.

    The fastest layout of the weights is tried first if it may work, then the layout of the file.
    Raises UserError when no layout gives equal logits.
    """
    config.disable_tiled_kernels()
    can_repack = repacks_for_amx() or not any(
        tensor.type in ROW_DEPENDENT_TYPES for tensor in header.tensors
    )
    for repack in (True, False) if can_repack else (False,):
        opened = open_model(
            header.path, gpu_layers=0, latent=header.has_latent_attention, repack=repack
        )
        with opened as model, open_context(model, replace(options, swa_full=True)) as context:
            if context.is_recurrent:
                raise UserError(
                    "--reproducible does not support models with recurrent state",
                    hint="leave out --reproducible",
                )
            if is_batch_invariant(context):
                yield model, context
                return
    raise UserError(
        "on this machine this model's logits depend on how many tokens are computed at once",
        hint="leave out --reproducible",
    )


def is_batch_invariant(context: Context) -> bool:
    """Return whether a few tokens give the same logits, bit for bit, one by one and in batches. The
    context must be empty before, and is empty afterwards.
    """
    tokens = [
        (7 + 101 * at) % context.n_vocab for at in range(min(TRIAL_TOKENS, context.n_ctx - 1))
    ]
    alone = _last(context, tokens, (1,) * len(tokens))
    return all(
        _last(context, tokens, split) == alone
        for split in TRIAL_SPLITS
        if max(split) <= context.n_batch
    )


def _last(context: Context, tokens: list[int], split: tuple[int, ...]) -> bytes:
    """Compute the tokens in passes of the sizes in `split`. Return the last token's logits as
    bytes, in which NaN equals NaN and 0 differs from -0.
    """
    context.clear()
    at = 0
    logits = b""
    for count in split:
        wants = [False] * (count - 1) + [True]
        (row,) = context.decode(
            BatchRows(tokens[at : at + count], range(at, at + count), [0] * count, wants)
        )
        logits, at = row.logits.tobytes(), at + count
    context.clear()
    return logits
