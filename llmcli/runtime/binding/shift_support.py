"""Whether a model's keys can be moved to other positions (K-shift). llama_memory_can_shift checks
M-RoPE and one architecture; the rest is read from the file or found by a trial.

Otherwise llama_kv_cache::build_graph_shift fails: ggml ends the process on bf16 keys, on quantized
keys of which only a part rotates, and on a cache without a layer to shift; keys with an attention
factor (YaRN, LongRoPE) are multiplied by it again, also those of other sequences; keys of layers
without positions (SmolLM 3) are rotated, too.
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
SHIFT_POSITIONS, N_SHIFTS = 32, 4  # positions of one shift, and their number; errors grow with each
# Error of the logits relative to their variance. Sound keys stay below 7e-3, quantized weights with
# their rounding included; keys that cannot be shifted give 2e-2 to 9e-1 (73 tiny models of 14
# families).
MAX_ERROR, NOISE_FACTOR = 1e-2, 5.0


def can_shift(model: Model, context: Context, type_k: str, open_trial: OpenContext) -> bool:
    """Return whether cells of a context can be moved: no recurrent state, a cache that ggml can
    shift, and moved text with the logits of recomputed text. The last is tried once per model, on a
    small context that `open_trial` opens.
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
    """Return whether a pass over shifted keys of this cache does not end the process; False for
    caches of unknown shape.
    """
    metadata = read_header.read_header(model.path).metadata
    arch, shape = metadata.get("general.architecture"), kv_size.read_shape(metadata)
    if shape is None or type_k == "bf16":
        return False
    if all(shape.is_windowed) or metadata.get(f"{arch}.rope.scaling.finetuned") is False:
        return False
    if f"{arch}.attention.rope_pattern" in metadata:
        return False
    # quantized keys were mixed within whole heads (attn_rot_k), so a part of a head cannot be
    # rotated
    heads = set(shape.k_heads)
    return type_k in ("f32", "f16") or heads == {
        metadata.get(f"{arch}.rope.dimension_count", max(heads))
    }


def _try_shift(model: Model, threads: int, open_trial: OpenContext) -> bool:
    """Compare a text computed at high positions and moved to the front with the same text computed
    at the front; the text computed at high positions shows the effect of rounding alone.
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
    """Return the last row of a text that starts at position `start` and is moved toward the front
    before its last token.
    """
    context.clear()
    context._positions.set_length(
        0, start
    )  # llama.cpp lets a sequence start anywhere; only this trial uses that
    *before, last = tokens
    positions = range(start, start + len(before))
    context.decode(BatchRows(before, positions, [0] * len(before), [False] * len(before)))
    for _ in range(shifts):
        start -= SHIFT_POSITIONS
        context.shift(0, start, start + SHIFT_POSITIONS, before[-1])
    return context.decode(BatchRows([last], [start + len(before)], [0], [True]))[0].logits.copy()
