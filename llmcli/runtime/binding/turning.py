"""Whether a model's keys can be turned to other positions. llama_memory_can_shift knows M-RoPE and
one architecture; the rest is read off the file, or found out by trying.

What goes wrong unasked (llama_kv_cache::build_graph_shift): ggml ends the process on bf16 keys, on
quantized ones of which only a part turns, and where a cache has no layer to turn; keys that carry
an attention factor (YaRN, LongRoPE) are multiplied by it once more, other sequences' as well; keys
of layers without positions (SmolLM 3) are turned, too.
"""

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from llmcli.runtime import kv
from llmcli.runtime.binding.library import lib
from llmcli.runtime.binding.model import Model
from quant import container

if TYPE_CHECKING:  # it asks here
    from llmcli.runtime.binding.context import Context

TEXT = "The capital of France is Paris, and the capital of Italy is Rome. The capital of Spain is"
STEP, STEPS = 32, 4  # positions of one shift, and how many: what is wrong grows with each
# Of the logits' variance. Sound keys: up to 7e-3, on quantized weights, whose rounding one last bit
# decides; those that cannot be turned: 2e-2 to 9e-1 (73 tiny models of 14 families).
WRONG, NOISE = 1e-2, 5.0


def can_shift(model: Model, memory: Any, type_k: str, threads: int) -> bool:
    """Whether cells can be moved: without state that is not kept by position, in a cache that ggml
    can turn, and with the logits that the moved text has where it is computed anew. The last is
    tried once a model, on a small context.
    """
    if (
        model.recurrent
        or not lib().llama_memory_can_shift(memory)
        or not _turns_at_all(model, type_k)
    ):
        return False
    if model.turns is None:
        model.turns = _tried(model, threads)
    return model.turns


def _turns_at_all(model: Model, type_k: str) -> bool:
    """Whether no pass over these keys ends the process: not of caches that we do not know."""
    metadata = container.read(model.path).metadata
    arch, shape = metadata.get("general.architecture"), kv.shape(metadata)
    if shape is None or type_k == "bf16":
        return False
    if all(shape.windowed) or metadata.get(f"{arch}.rope.scaling.finetuned") is False:
        return False
    if f"{arch}.attention.rope_pattern" in metadata:
        return False
    # Quantized keys were mixed within whole heads (attn_rot_k): a part of one cannot be turned
    # alone.
    heads = set(shape.k_heads)
    return type_k in ("f32", "f16") or heads == {
        metadata.get(f"{arch}.rope.dimension_count", max(heads))
    }


def _tried(model: Model, threads: int) -> bool:
    """A text computed far behind and moved to the front, against the same computed at the front;
    and computed behind, which tells how much rounding alone makes of it.
    """
    from llmcli.runtime.binding.context import ContextOptions, open_context

    tokens = model.tokenize(TEXT, special=False, add_special=True)[:STEP]
    options = ContextOptions(256, STEP, STEP, 1, threads, threads)
    with open_context(model, options) as context:
        context.can_shift = True  # what is being found out
        front = _logits(context, tokens, 0, 0)
        moved = _logits(context, tokens, STEP * STEPS, STEPS)
        behind = _logits(context, tokens, STEP * STEPS, 0)
    wrong, noise = (
        float(np.square(one - front).mean() / (front.var() or 1)) for one in (moved, behind)
    )
    return wrong <= max(WRONG, NOISE * noise)


def _logits(context: "Context", tokens: list[int], start: int, shifts: int) -> NDArray[np.float32]:
    """The last row of a text whose first position is `start`, moved towards the front before its
    last token.
    """
    from llmcli.runtime.binding.context import Rows

    context.clear()
    context._positions.put(
        0, start
    )  # llama.cpp lets a sequence begin anywhere, which nobody else may
    *before, last = tokens
    places = range(start, start + len(before))
    context.decode(Rows(before, places, [0] * len(before), [False] * len(before)))
    for _ in range(shifts):
        start -= STEP
        context.shift(0, start, start + STEP, before[-1])
    return context.decode(Rows([last], [start + len(before)], [0], [True]))[0].logits.copy()
