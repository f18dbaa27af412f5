"""The reproducible mode: the same logits, bit for bit, for the same tokens in any batch.

llama.cpp has several kernels for a product and chooses by the number of rows; they round
differently, and quantizing the inputs turns a different last bit into differences of half a logit.
Rows become independent of their batch with

- quantized weights, whose rows all kernels sum in the same way, except repacked k-quants without
  AMX and tiled k-quants from eight rows on,
- a q8_0 cache with flash attention, which has one path where f16 has three,
- cells in token order: no ring of a sliding window, and no holes that are filled.

The result is tested on every model before it is used, because other machines have other kernels.
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
# Repacked for AVX, NEON or RVV, four rows of these types give other sums than four single rows, or
# were not measured.
ROW_DEPENDENT_TYPES = ("Q4_K", "Q2_K", "Q3_K", "Q5_K", "Q6_K", "IQ4_NL", "MXFP4")
TRIAL_TOKENS = (
    # tokens of the trial: k-quants change their kernel at eight rows, other types at two and four
    9
)
TRIAL_SPLITS = ((9,), (2, 7), (4, 5), (8, 1))


def with_required_options(options: RunOptions) -> RunOptions:
    """Return the options with those that the mode requires. Conflicting choices must have been
    refused before.
    """
    chosen: Any = REQUIRED_OPTIONS
    return replace(options, reproducible=True, **chosen)


def check_model(header: ModelHeader) -> None:
    """Raise UserError when this file's logits depend on the batch whatever the options are."""
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
    """Open a model and a context whose rows do not depend on their batch.

    The fastest layout of the weights is tried first if it is known to work, then the file's own.
    Raises UserError when none gives equal logits.
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
    context must be empty, and is empty afterwards.
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
    """Return the last token's logits as bytes, computed in passes of these sizes. Bytes make NaN
    equal to NaN and 0 different from -0.
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
