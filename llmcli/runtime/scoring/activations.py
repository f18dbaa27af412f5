"""Run text through a model and collect the activations that enter its weight matrices, for the
calibration of quantization.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from llmcli.runtime.binding.contexts.context import Context
from llmcli.runtime.binding.contexts.context_options import ContextOptions
from llmcli.runtime.binding.contexts.open_context import open_context
from llmcli.runtime.binding.eval_callback import AttentionMix, ProductInput, ProductWatcher
from llmcli.runtime.binding.model import Model
from llmcli.runtime.binding.rows.batch import BatchRows
from llmcli.runtime.engine.forward_pass import TILE_ROWS
from llmcli.runtime.interruptible_pass import interruptible
from llmcli.runtime.scoring.chunk_scorer import max_logit_rows


class Activations:
    """A context that computes chunks of text and passes the input of each weight matrix to a sink
    function. Made by `open_activations`.
    """

    def __init__(self, model: Model, context: Context, watcher: ProductWatcher) -> None:
        self.context, self._watcher = context, watcher
        self.bos = model.bos if model.add_bos else None

    def narrow(self, is_wanted: Callable[[str], bool], last_weight: str) -> None:
        """Change which weights the next passes watch. `is_wanted`: returns whether the weight of
        this name is watched. `last_weight`: every pass ends after the product with this weight,
        because later products are not needed; empty to compute all.
        """
        self._watcher.narrow(is_wanted, last_weight)

    @property
    def latest_weight(self) -> str:
        """Return the name of the weight whose input the sink received last."""
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
        step = min(self.context.n_batch, self.context.n_outputs)
        for start in range(0, len(tokens), step):
            end = min(start + step, len(tokens))
            count = end - start
            with interruptible(self.context):
                self.context.decode(
                    BatchRows(tokens[start:end], range(start, end), [0] * count, [True] * count)
                )
            self._watcher.check()


@contextmanager
def open_activations(
    model: Model,
    options: ContextOptions,
    is_wanted: Callable[[str], bool],
    sink: Callable[[ProductInput | AttentionMix], None],
) -> Iterator[Activations]:
    """Open a context that passes the inputs of watched weights to `sink`, and close it after the
    `with` block.

    `options`: the options of a context for one chunk. `is_wanted`: returns whether the weight of
    this name is watched. Attention weights, also watched by name, are passed only without flash
    attention.
    """
    from dataclasses import replace

    n_rows = min(max_logit_rows(model.n_vocab), options.n_ubatch, options.n_ctx)
    n_outputs = n_rows // TILE_ROWS * TILE_ROWS or n_rows
    watcher = ProductWatcher(is_wanted, sink)
    with open_context(model, replace(options, n_outputs=n_outputs), watcher.callback) as context:
        yield Activations(model, context, watcher)
