"""Decides whether cached keys of a model can be moved to other positions (K-shift).
llama_memory_can_shift checks only M-RoPE and one architecture. The other conditions are read from
the model file or found by a trial.

The moves fail in llama_kv_cache::build_graph_shift. ggml ends the process for bf16 keys, for
quantized keys of which only a part is rotated, and for a cache without a layer to shift. With an
attention factor (YaRN, LongRoPE) all keys are multiplied by the factor a second time, including
those of other sequences. In layers without positions (SmolLM 3), keys are rotated although they
must not be.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager

import numpy as np
from numpy.typing import NDArray

from llmcli.runtime import kv_size
from llmcli.runtime.binding.contexts.context import Context
from llmcli.runtime.binding.contexts.context_options import ContextOptions
from llmcli.runtime.binding.library import lib
from llmcli.runtime.binding.model import Model
from llmcli.runtime.binding.rows.batch import BatchRows
from quant.model_file import read_header

OpenContext = Callable[[Model, ContextOptions], AbstractContextManager[Context]]

TRIAL_TEXT = (
    "The capital of France is Paris, and the capital of Italy is Rome. The capital of Spain is"
)
# positions of one shift, and number of shifts in the trial; errors grow with each shift
SHIFT_POSITIONS, N_SHIFTS = 32, 4
# The largest allowed error of the logits: a mean squared error relative to their variance, or this
# multiple of the error that rounding alone causes, whichever is larger. Keys that can be shifted
# stay below it even with quantized weights; keys that cannot be shifted exceed it at least twofold.
MAX_ERROR, NOISE_FACTOR = 1e-2, 5.0


def can_shift(model: Model, context: Context, type_k: str, open_trial: OpenContext) -> bool:
    """Return whether cells of a context can be moved to other positions.

    The model must have no recurrent state, ggml must be able to shift the cache, and text that was
    moved must give the same logits as text computed at the new positions. The last condition is
    tried once per model, in a small context that `open_trial` opens.
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
    """Return whether ggml can shift keys of this model and cache type without ending the process.
    Return False if the shape of the cache cannot be read from the file.
    """
    metadata = read_header.read_header(model.path).metadata
    arch, shape = metadata.get("general.architecture"), kv_size.read_shape(metadata)
    if shape is None or type_k == "bf16":
        return False
    if all(shape.is_windowed) or metadata.get(f"{arch}.rope.scaling.finetuned") is False:
        return False
    if f"{arch}.attention.rope_pattern" in metadata:
        return False
    # quantized keys are mixed across the whole head (attn_rot_k), so a part of a head cannot be
    # rotated
    heads = set(shape.k_heads)
    return type_k in ("f32", "f16") or heads == {
        metadata.get(f"{arch}.rope.dimension_count", max(heads))
    }


def _try_shift(model: Model, threads: int, open_trial: OpenContext) -> bool:
    """Return whether moved keys give the right logits.

    A text is computed at high positions and moved to the front. Its logits are compared with those
    of the same text computed at the front. The text computed at high positions and not moved shows
    how large the error from rounding alone is.
    """
    tokens = model.tokenize(TRIAL_TEXT, special=False, add_special=True)[:SHIFT_POSITIONS]
    options = ContextOptions(256, SHIFT_POSITIONS, SHIFT_POSITIONS, 1, threads, threads)
    with open_trial(model, options) as context:
        context.can_shift = True  # assumed here, because this is the trial
        front = _logits(context, tokens, 0, 0)
        moved = _logits(context, tokens, SHIFT_POSITIONS * N_SHIFTS, N_SHIFTS)
        unmoved = _logits(context, tokens, SHIFT_POSITIONS * N_SHIFTS, 0)
    error, noise = (
        float(np.square(shifted - front).mean() / (front.var() or 1))
        for shifted in (moved, unmoved)
    )
    return error <= max(MAX_ERROR, NOISE_FACTOR * noise)


def _logits(context: Context, tokens: list[int], start: int, shifts: int) -> NDArray[np.float32]:
    """Return the logits after the last token of a text, float32 `[n_vocab]`. The text starts at
    position `start`. Before its last token is computed, the text is moved toward the front `shifts`
    times, by SHIFT_POSITIONS each.
    """
    context.clear()
    # llama.cpp lets an empty sequence start at any position, which only this trial uses
    context._positions.set_length(0, start)
    *earlier, last = tokens
    positions = range(start, start + len(earlier))
    context.decode(BatchRows(earlier, positions, [0] * len(earlier), [False] * len(earlier)))
    for _ in range(shifts):
        start -= SHIFT_POSITIONS
        context.shift(0, start, start + SHIFT_POSITIONS, earlier[-1])
    return context.decode(BatchRows([last], [start + len(earlier)], [0], [True]))[0].logits.copy()
