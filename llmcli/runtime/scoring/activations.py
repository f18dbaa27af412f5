"""Run text through a model and collect the activations that enter its weight matrices, for the
calibration of quantization.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from llmcli.runtime.binding.contexts.context import Context
from llmcli.runtime.binding.contexts.context_options import ContextOptions
from llmcli.runtime.binding.contexts.open_context import open_context, open_prediction_context
from llmcli.runtime.binding.contexts.prediction_context import (
    PredictionContext,
    States,
    read_states,
)
from llmcli.runtime.binding.eval_callback import AttentionMix, ProductInput, ProductWatcher
from llmcli.runtime.binding.model import Model
from llmcli.runtime.binding.rows.batch import BatchRows
from llmcli.runtime.engine.forward_pass import TILE_ROWS
from llmcli.runtime.interruptible_pass import interruptible
from llmcli.runtime.scoring.chunk_scorer import max_logit_rows

# the number of a layer in the name of a weight, or of a product of attention weights and values
LAYER_NUMBER = re.compile(r"(?:blk\.|kqv-)(\d+)")


class Activations:
    """A context that computes chunks of text and passes the input of each weight matrix to a sink
    function. Made by `open_activations`.

    The weights of layers that predict further tokens are watched in a context of their own, which
    computes each piece of text after the model, from the model's hidden states.
    """

    def __init__(
        self,
        model: Model,
        context: Context,
        watcher: ProductWatcher,
        prediction: "PredictionActivations | None" = None,
    ) -> None:
        self.context, self._watcher, self._prediction = context, watcher, prediction
        self.bos = model.bos if model.add_bos else None

    def narrow(self, is_wanted: Callable[[str], bool], last_weight: str) -> None:
        """Change which weights the next passes watch. `is_wanted`: returns whether the weight of
        this name is watched. `last_weight`: every pass ends after the product with this weight,
        because later products are not needed; empty to compute all.
        """
        prediction = self._prediction
        if prediction is None:
            self._watcher.narrow(is_wanted, last_weight)
            return
        # the prediction layers need the hidden states of a complete pass
        prediction.is_active = not last_weight or prediction.has_weight(last_weight)
        self._watcher.narrow(is_wanted, "" if prediction.is_active else last_weight)
        prediction.watcher.narrow(prediction.only_own(is_wanted), last_weight)

    @property
    def latest_weight(self) -> str:
        """Return the name of the weight whose input the sink received last."""
        prediction = self._prediction
        if prediction and prediction.is_active and prediction.watcher.latest_weight:
            return prediction.watcher.latest_weight
        return self._watcher.latest_weight

    def read(self, ids: NDArray[np.int32]) -> None:
        """Compute one chunk of text. The sink receives the inputs of the watched weights. If the
        model uses a BOS token, it replaces the first token.

        Logits of every position are requested, because llama.cpp otherwise computes the last layer
        and the output head only for some positions.

        Shapes: ids `[n_ctx]`. Raises the exceptions of the sink, and KeyboardInterrupt at Ctrl-C.
        """
        tokens = ids.tolist()
        if self.bos is not None:
            tokens[0] = self.bos
        self.context.clear()
        if self._prediction:
            self._prediction.begin()
        step = min(self.context.n_batch, self.context.n_outputs)
        for start in range(0, len(tokens), step):
            piece = tokens[start : start + step]
            positions = range(start, start + len(piece))
            with interruptible(self.context):
                self.context.decode(
                    BatchRows(piece, positions, [0] * len(piece), [True] * len(piece))
                )
            self._watcher.check()
            if self._prediction and self._prediction.is_active:
                self._prediction.read(piece, start, read_states(self.context, len(piece)))


class PredictionActivations:
    """The context of the layers that predict further tokens.

    `first_layer`: the number of the first of these layers, which are the last of the file.
    """

    def __init__(
        self, context: PredictionContext, watcher: ProductWatcher, first_layer: int
    ) -> None:
        self.context, self.watcher, self.first_layer = context, watcher, first_layer
        self.is_active = True
        self._before: States | None = None  # the state of the last row of the piece before

    def has_weight(self, name: str) -> bool:
        """Return whether a weight, or a product of attention weights and values, is in these
        layers.
        """
        found = LAYER_NUMBER.match(name)
        return found is not None and int(found[1]) >= self.first_layer

    def only_own(self, is_wanted: Callable[[str], bool]) -> Callable[[str], bool]:
        """Return a function that returns whether a weight is in these layers and `is_wanted`. They
        also multiply by weights of the model, whose statistics are those of the model's passes.
        """
        return lambda name: self.has_weight(name) and is_wanted(name)

    def begin(self) -> None:
        """Begin a chunk of text."""
        self.context.cut(0)
        self._before = None

    def read(self, tokens: list[int], start: int, states: States) -> None:
        """Compute a piece of a chunk from position `start` on, with the model's hidden states
        `[tokens, n_embd]`. The first token of a chunk is left out, because there is no state before
        it.
        """
        before, self._before = self._before, states[-1].copy()
        n_skipped = int(before is None)
        shifted = states[:-1] if before is None else np.vstack([before, states[:-1]])
        if len(tokens) > n_skipped:
            with interruptible(self.context):
                self.context.predict(tokens[n_skipped:], start + n_skipped, shifted, all_rows=True)
            self.watcher.check()


@contextmanager
def open_activations(
    model: Model,
    options: ContextOptions,
    is_wanted: Callable[[str], bool],
    sink: Callable[[ProductInput | AttentionMix], None],
    first_prediction_layer: int | None = None,
) -> Iterator[Activations]:
    """Open a context that passes the inputs of watched weights to `sink`, and close it after the
    `with` block.

    `options`: the options of a context for one chunk. `is_wanted`: returns whether the weight of
    this name is watched. Attention weights, also watched by name, are passed only without flash
    attention. `first_prediction_layer`: the number of the first layer that predicts further tokens,
    if `model` has loaded such layers and they are watched, too.
    """
    n_rows = min(max_logit_rows(model.n_vocab), options.n_ubatch, options.n_ctx)
    n_outputs = n_rows // TILE_ROWS * TILE_ROWS or n_rows
    options = replace(
        options, n_outputs=n_outputs, outputs_states=first_prediction_layer is not None
    )
    watcher = ProductWatcher(is_wanted, sink)
    with ExitStack() as stack:
        context = stack.enter_context(open_context(model, options, watcher.callback))
        prediction = None
        if first_prediction_layer is not None:
            predicted = ProductWatcher(is_wanted, sink)
            settings = replace(options, outputs_states=False)
            opened = open_prediction_context(model, context, settings, predicted.callback)
            prediction = PredictionActivations(
                stack.enter_context(opened), predicted, first_prediction_layer
            )
        activations = Activations(model, context, watcher, prediction)
        activations.narrow(is_wanted, "")
        yield activations
