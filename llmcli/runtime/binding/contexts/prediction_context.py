"""A context of a model's own prediction layers (MTP): from the hidden state of one token and the
token that follows it, they predict the token after that.

The layers have a KV cache of their own and share the weights of the model. The functions are those
of llama.cpp's src/llama-ext.h, whose names in the library are those of C++.
"""

import ctypes
import importlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from llmcli.runtime.binding.contexts.context import Context
from llmcli.runtime.binding.contexts.context_options import ContextOptions
from llmcli.runtime.binding.library import lib
from llmcli.runtime.binding.rows.batch import BatchRows, StateBatch
from llmcli.runtime.binding.rows.logits_row import LogitsRow
from quant.model_file.model_header import ModelHeader

States = NDArray[np.float32]  # of shape [rows, n_embd]
CHUNK_TOKENS = 256  # tokens of a prompt that the layers compute in one pass
# Architectures with such layers in llama.cpp (graph_mtp of src/models)
ARCHITECTURES = frozenset(
    [
        "bailingmoe3",
        "cohere2moe",
        "deepseek2",
        "deepseek32",
        "glm-dsa",
        "glm4moe",
        "hy_v3",
        "mimo2",
        "nemotron_h_moe",
        "qwen35",
        "qwen35moe",
        "qwen3next",
        "step35",
    ]
)


def first_prediction_layer(header: ModelHeader) -> int | None:
    """Return the number of the first layer that predicts further tokens, or None if the file has
    none that llama.cpp computes.
    """
    count = header.get_int("nextn_predict_layers") or 0
    if not count or header.architecture not in ARCHITECTURES:
        return None
    return (header.get_int("block_count") or 0) - count


def prediction_options(options: ContextOptions) -> ContextOptions:
    """Return the options of a prediction context. `options`: those of the model's context, which has
    the same length.
    """
    return replace(
        options,
        n_batch=min(CHUNK_TOKENS, options.n_batch),
        n_ubatch=min(CHUNK_TOKENS, options.n_ubatch),
        n_seq_max=1,
        n_outputs=1,
        can_append=False,
        has_spare=False,
        n_rs_seq=0,
        n_branches=0,
        outputs_states=False,
        outputs_final_states=False,
    )


def extensions() -> Any:
    """Return the binding of llama-ext.h."""
    lib()
    return importlib.import_module("llama_cpp.llama_cpp_ext")


def enable_states(context: Any, only_outputs: bool) -> None:
    """Make a llama.cpp context keep the hidden states of the rows of a pass: of all rows, or only of
    those with logits.
    """
    extensions().llama_set_embeddings_nextn(context, True, only_outputs)


def disable_states(context: Any) -> None:
    """Make a llama.cpp context keep no hidden states any more."""
    extensions().llama_set_embeddings_nextn(context, False, False)


def stop_states(context: Context) -> None:
    """Make a model's context keep no hidden states of later passes. Its buffer does not shrink."""
    if context.outputs_states:
        disable_states(context.pointer)
        context.outputs_states = False
    if context.outputs_final_states:
        context.stop_final_states()


def read_states(context: Context, count: int) -> States:
    """Return the hidden states of the first `count` rows of the last pass. They are valid until the
    next pass.
    """
    pointer = extensions().llama_get_embeddings_nextn(context.pointer)
    return np.ctypeslib.as_array(pointer, (count, context.n_embd))


class PredictionContext(Context):
    """The prediction layers of a model, for one sequence.

    `computes_all_rows`: whether llama.cpp's graph computes the logits of all rows of a pass, so that
    all must be asked for.
    """

    computes_all_rows: ClassVar[bool] = False

    def predict(
        self, tokens: Sequence[int], start: int, states: States, all_rows: bool = False
    ) -> LogitsRow:
        """Compute tokens from position `start` on, each with the hidden state of the token before
        it (`[tokens, n_embd]`). Return the logits of the token after the last one. `all_rows`: also
        compute the logits of the other tokens.

        Raises like `Context.decode`.
        """
        count = len(tokens)
        if not isinstance(self._batch, StateBatch):
            self._batch = StateBatch(self.n_batch, self.n_embd)
        if not self._positions.length(0):
            self._positions.set_length(0, start)  # the earlier tokens were never seen
        self._batch.states[:count] = states
        wanted = [all_rows or self.computes_all_rows] * (count - 1) + [True]
        rows = BatchRows(tokens, range(start, start + count), [0] * count, wanted)
        return self.decode(rows)[-1]

    def last_state(self, row: LogitsRow) -> States:
        """Return the hidden state of a row of the last pass, of shape `[n_embd]`."""
        pointer = extensions().llama_get_embeddings_nextn_ith(self.pointer, row.index)
        return np.ctypeslib.as_array(
            ctypes.cast(pointer, ctypes.POINTER(ctypes.c_float)), (self.n_embd,)
        ).copy()

    @property
    def has_cells(self) -> bool:
        """Return whether any token is in the cache."""
        return self.last_position(0) >= 0

    def cut(self, length: int) -> None:
        """Drop the cells from position `length` on."""
        lib().llama_memory_seq_rm(self.memory, 0, length, -1)
        self._positions.set_length(0, self.last_position(0) + 1)
