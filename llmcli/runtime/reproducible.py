"""The reproducible mode: the same bits for the same tokens, whatever the batch they were computed
in.

llama.cpp has several kernels for one product and takes one by the number of rows; they round
differently, quantized weights quantize their inputs, and so a last bit becomes half a logit. Three
things make the rows of a batch alike: quantized weights, whose rows are summed the same way by all
kernels but two (k-quants laid out anew without AMX, four rows against one, up to 2 logits; tiled
k-quants, from eight rows on, 1.4); a q8_0 cache with flash attention, which has one path where f16
has three; and cells in the order of the tokens (a window's ring, and holes that are filled, 0.7 to
1.1). Measured by scripts/measure_reproducible.py on a Xeon with AMX, 2026-11. What is chosen here
is tried on every model before it is used: other machines have other kernels.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from llmcli import config
from llmcli.errors import UserError
from llmcli.runtime import kv
from llmcli.runtime.binding.context import Context, ContextOptions, Rows, open_context
from llmcli.runtime.binding.devices import lays_out_for_amx
from llmcli.runtime.binding.model import Model, open_model
from llmcli.runtime.request import RunOptions
from quant.container import Header, TensorInfo

CACHE = "q8_0"
NEEDS = {
    "cache_type_k": CACHE,
    "cache_type_v": CACHE,
    "flash_attn": "on",
    "gpu_layers": "0",
    "gemm": "ggml",
}
COVERS = (
    "reproducible: one prompt, one seed, one text, whatever the batch sizes, the threads, and what is cached; "
    "not on another CPU, build or GPU"
)
FLOATS = ("F32", "F16", "BF16", "F64")
LOOKED_UP = (
    "token_embd.weight",
    "position_embd.weight",
    "token_types.weight",
)  # rows are copied, not multiplied
# Laid out anew for AVX, NEON or RVV, four rows of these are not four times one row, or were not
# measured.
COUNTED = ("Q4_K", "Q2_K", "Q3_K", "Q5_K", "Q6_K", "IQ4_NL", "MXFP4")
ROWS = (
    9  # tokens of the trial: k-quants change their kernel at eight rows, others at two and at four
)
SPLITS = ((9,), (2, 7), (4, 5), (8, 1))


def settled(options: RunOptions) -> RunOptions:
    """The options with what the mode needs. What was chosen otherwise must have been refused."""
    chosen: Any = NEEDS
    return replace(options, reproducible=True, **chosen)


def check(header: Header) -> None:
    """Raise UserError where this file's numbers depend on the batch in a way that nothing can help."""
    multiplied = [tensor for tensor in header.tensors if _multiplied(tensor, header)]
    floats = [tensor for tensor in multiplied if tensor.type in FLOATS]
    if floats:
        first, most = floats[0], 2 * len(floats) > len(multiplied)
        what = f"{first.name} is {first.type}" + (
            f", as {len(floats) - 1} more" if len(floats) > 1 else ""
        )
        raise UserError(
            f"--reproducible needs quantized weights: {what}, and floats round otherwise in batches",
            hint=f"llmcli quantize '{header.path}' --q8_0"
            if most
            else "leave out --reproducible for this model",
        )
    kv.check(header.metadata, CACHE, CACHE, reproducible=True)


def _multiplied(tensor: TensorInfo, header: Header) -> bool:
    if sum(size > 1 for size in tensor.shape) < 2 or not tensor.name.endswith(".weight"):
        return False
    tied = not any(other.name == "output.weight" for other in header.tensors)
    return tensor.name not in LOOKED_UP or (tied and tensor.name == LOOKED_UP[0])


@contextmanager
def open_alike(header: Header, options: ContextOptions) -> Iterator[tuple[Model, Context]]:
    """A model and a context whose rows do not know their batch; raises UserError where there is
    none to be had.

    The fastest layout of the matrices is tried first where it may do, then the file's own.
    """
    config.one_kernel()
    laid_out = lays_out_for_amx() or not any(tensor.type in COUNTED for tensor in header.tensors)
    for repack in (True, False) if laid_out else (False,):
        opened = open_model(header.path, gpu_layers=0, latent=header.latent, repack=repack)
        with opened as model, open_context(model, replace(options, whole=True)) as context:
            if context.recurrent:
                raise UserError(
                    "--reproducible does not cover models with recurrent state",
                    hint="leave out --reproducible",
                )
            if alike(context):
                yield model, context
                return
    raise UserError(
        "on this machine this model's numbers depend on how many tokens are computed at once",
        hint="leave out --reproducible",
    )


def alike(context: Context) -> bool:
    """Whether a few tokens give the same bits one by one and in batches. The context is empty
    before and after.
    """
    tokens = [(7 + 101 * at) % context.n_vocab for at in range(min(ROWS, context.n_ctx - 1))]
    alone = _last(context, tokens, (1,) * len(tokens))
    return all(
        _last(context, tokens, split) == alone for split in SPLITS if max(split) <= context.n_batch
    )


def _last(context: Context, tokens: list[int], split: tuple[int, ...]) -> bytes:
    """The last token's logits where as many tokens a pass are computed, as bytes: NaN is like NaN,
    and 0 is not -0.
    """
    context.clear()
    at = 0
    logits = b""
    for count in split:
        wants = [False] * (count - 1) + [True]
        (row,) = context.decode(
            Rows(tokens[at : at + count], range(at, at + count), [0] * count, wants)
        )
        logits, at = row.logits.tobytes(), at + count
    context.clear()
    return logits
