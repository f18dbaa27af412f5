"""Finds out whether a model's keys can be moved to other positions (K-shift).
llama_memory_can_shift checks only M-RoPE and one architecture; the other conditions are read from
the file or found by a trial.

These are the cases in which llama_kv_cache::build_graph_shift fails. ggml ends the process on bf16
keys, on quantized keys of which only a part is rotated, and on a cache without a layer to shift.
Keys with an attention factor (YaRN, LongRoPE) are multiplied by the factor again, including those
of other sequences. Keys of layers without positions (SmolLM 3) are rotated although they must not
be.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager

import numpy as np
from numpy.typing import NDArray

from llmcli.runtime import kv_size
from llmcli.runtime.binding.batch import BatchRows
from llmcli.runtime.binding.context import Context
from llmcli.runtime.binding.context_options import ContextOptions
from llmcli.runtime.binding.library import lib
from llmcli.runtime.binding.model import Model
from quant.model_file import read_header

OpenContext = Callable[[Model, ContextOptions], AbstractContextManager[Context]]

TRIAL_TEXT = (
    "The capital of France is Paris, and the capital of Italy is Rome. The capital of Spain is"
)
# positions of one shift, and number of shifts in the trial; errors grow with each shift
SHIFT_POSITIONS, N_SHIFTS = 32, 4
# The largest allowed error of the logits: a mean squared error relative to their variance, and a
# multiple of the error that rounding alone causes. Keys that can be shifted stay below 7e-3,
# including the rounding of quantized weights; keys that cannot be shifted give 2e-2 to 9e-1 (73
# tiny models of 14 families).
MAX_ERROR, NOISE_FACTOR = 1e-2, 5.0


def can_shift(model: Model, context: Context, type_k: str, open_trial: OpenContext) -> bool:
    """Return whether cells of a context can be moved. This needs a model without recurrent state, a
    cache that ggml can shift, and moved text that gives the same logits as recomputed text. The
    last condition is tried once per model, in a small context that `open_trial` opens.
    """
    if (
        model.is_recurrent
        or not lib().llama_memory_can_shift(context.memory)
        or not _can_compute_shift(model, type_k)
    ):
        return False
    if model.can_shift_keys is None:
        threads = lib().llama_n_threads_batch(context.pointer)
        model.can_shift_keys = _try_shift(model, threads, open_trial)
    return model.can_shift_keys


def _can_compute_shift(model: Model, type_k: str) -> bool:
    """Return whether ggml can compute a shift of this cache without ending the process. It is False
    for caches of unknown shape.
    """
    metadata = read_header.read_header(model.path).metadata
    arch, shape = metadata.get("general.architecture"), kv_size.read_shape(metadata)
    if shape is None or type_k == "bf16":
        return False
    if all(shape.is_windowed) or metadata.get(f"{arch}.rope.scaling.finetuned") is False:
        return False
    if f"{arch}.attention.rope_pattern" in metadata:
        return False
    # the values of quantized keys are mixed across the whole head (attn_rot_k), so rotating a part
    # of a head is not possible
    heads = set(shape.k_heads)
    return type_k in ("f32", "f16") or heads == {
        metadata.get(f"{arch}.rope.dimension_count", max(heads))
    }


def _try_shift(model: Model, threads: int, open_trial: OpenContext) -> bool:
    """Return whether a text that is computed at high positions and then moved to the front gives
    the same logits as one computed at the front. The same text computed at high positions and not
    moved shows how much rounding alone changes.
    """
    tokens = model.tokenize(TRIAL_TEXT, special=False, add_special=True)[:SHIFT_POSITIONS]
    options = ContextOptions(256, SHIFT_POSITIONS, SHIFT_POSITIONS, 1, threads, threads)
    with open_trial(model, options) as context:
        context.can_shift = True  # assumed here, because this is the trial
        front = _logits(context, tokens, 0, 0)
        moved = _logits(context, tokens, SHIFT_POSITIONS * N_SHIFTS, N_SHIFTS)
        behind = _logits(context, tokens, SHIFT_POSITIONS * N_SHIFTS, 0)
    error, noise = (
        float(np.square(shifted - front).mean() / (front.var() or 1)) for shifted in (moved, behind)
    )
    return error <= max(MAX_ERROR, NOISE_FACTOR * noise)


def _logits(context: Context, tokens: list[int], start: int, shifts: int) -> NDArray[np.float32]:
    """Return the logits after the last token of a text. The text starts at position `start`, and is
    moved toward the front `shifts` times before its last token is computed.
    """
    context.clear()
    context._positions.set_length(
        0, start
    )  # llama.cpp lets an empty sequence start at any position, which only this trial uses
    *before, last = tokens
    positions = range(start, start + len(before))
    context.decode(BatchRows(before, positions, [0] * len(before), [False] * len(before)))
    for _ in range(shifts):
        start -= SHIFT_POSITIONS
        context.shift(0, start, start + SHIFT_POSITIONS, before[-1])
    return context.decode(BatchRows([last], [start + len(before)], [0], [True]))[0].logits.copy()
