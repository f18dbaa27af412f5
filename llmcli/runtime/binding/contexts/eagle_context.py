"""A context of an EAGLE-3 draft: a small model that predicts tokens from the inputs of three layers
of a larger one, its target.

The draft has an encoder, which turns the inputs of the three layers at a token into one hidden
state, and a decoder of one layer. From the state of one token and the token that follows it, the
decoder predicts the token after that. Weights that the draft's file lacks, the embeddings of tokens
and the output matrix, are those of the target.

Source: EAGLE-3 (Li et al. 2025); llama.cpp, src/models/eagle3.cpp. The functions of src/llama-ext.h
have their names of C++ in the library.
"""

import ctypes
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from llmcli.errors import UserError
from llmcli.runtime.binding import contract
from llmcli.runtime.binding.contexts.context import Aborted, Context
from llmcli.runtime.binding.contexts.prediction_context import (
    PredictionContext,
    States,
    disable_states,
    enable_states,
    read_states,
)
from llmcli.runtime.binding.library import ggml, last_log_lines, lib, reset_log
from llmcli.runtime.binding.rows.batch import InputBatch

# Rows of a pass. The graph of the decoder computes the logits of every row, and the encoder reserves
# as many, so that more rows would take much memory.
MAX_ROWS = 32


@dataclass(frozen=True, slots=True)
class LayerInputs:
    """The inputs of layers of the model in a context, as an EAGLE-3 draft reads them.

    - `layers`: the numbers of the layers. The number of all layers stands for the state after the
      last one.
    - `n_layers`: how many layers the model has.
    - `width`: how many numbers each input has.
    """

    context: Context
    layers: Sequence[int]
    n_layers: int
    width: int

    def enable(self) -> None:
        """Make the context keep these inputs for all rows of a pass."""
        pointer = self.context.pointer
        for layer in set(self.layers):
            self.context.state_bytes += 4 * self.width * lib().llama_n_batch(pointer)
            if layer == self.n_layers:
                enable_states(pointer, only_outputs=False)
            else:
                _layer_functions()[0](pointer, layer, True)

    def disable(self) -> None:
        """Make the context keep none of these inputs any more. Its buffer does not shrink."""
        pointer = self.context.pointer
        for layer in set(self.layers):
            if layer == self.n_layers:
                disable_states(pointer)
            else:
                _layer_functions()[0](pointer, layer, False)

    def read(self, count: int) -> States:
        """Return the inputs of the first `count` rows of the last pass, of shape
        `[count, layers * width]`.
        """
        return np.concatenate([self._read_layer(layer, count) for layer in self.layers], axis=1)

    def _read_layer(self, layer: int, count: int) -> States:
        if layer == self.n_layers:
            return read_states(self.context, count)
        pointer = _layer_functions()[1](self.context.pointer, layer)
        return np.ctypeslib.as_array(pointer, (count, self.width))


class EagleContext(PredictionContext):
    """An EAGLE-3 draft, for one sequence of its target."""

    computes_all_rows: ClassVar[bool] = True

    def __init__(self, inputs: LayerInputs, *parts: Any) -> None:
        """`parts`: the arguments of Context."""
        super().__init__(*parts)
        # A context of a model with an encoder has no memory otherwise.
        self.memory = lib().llama_get_memory(self.pointer)
        self.inputs = inputs
        self._inputs_batch = InputBatch(self.n_batch, len(inputs.layers) * inputs.width)

    def encode(self, inputs: States) -> States:
        """Return the hidden states of rows, `[rows, n_embd]`, from their layer inputs. At most
        `n_batch` rows are possible.

        Raises Aborted when the pass was interrupted, and UserError when llama.cpp fails.
        """
        self._inputs_batch.fill(inputs)
        reset_log()
        code = lib().llama_encode(self.pointer, self._inputs_batch.struct)
        self.stop.reset()
        if code == 2:
            raise Aborted
        if code:
            raise UserError(
                f"llama.cpp could not encode the inputs of layers (code {code}): "
                f"{last_log_lines() or 'no reason given'}",
                hint="leave out --model-draft",
            )
        lib().llama_synchronize(self.pointer)
        return read_states(self, len(inputs)).copy()


def can_read_layer_inputs() -> bool:
    """Return whether this build of llama.cpp can give the inputs of layers."""
    library = ggml()
    return all(
        contract.optional_function(library, symbol) is not None
        for symbol in (contract.SET_LAYER_INPUT, contract.GET_LAYER_INPUT)
    )


@functools.cache
def _layer_functions() -> tuple[Any, Any]:
    """Return the functions of llama-ext.h that switch and read the input of a layer."""
    library = ggml()
    switch = contract.optional_function(library, contract.SET_LAYER_INPUT)
    read = contract.optional_function(library, contract.GET_LAYER_INPUT)
    assert switch is not None and read is not None, "can_read_layer_inputs()"
    switch.argtypes = [ctypes.c_void_p, ctypes.c_uint32, ctypes.c_bool]
    switch.restype = None
    read.argtypes = [ctypes.c_void_p, ctypes.c_uint32]
    read.restype = ctypes.POINTER(ctypes.c_float)
    return switch, read
