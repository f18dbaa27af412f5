"""Runs text through a model and passes the inputs of its products with weights to a function, for
calibration.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from llmcli.runtime.binding.batch import BatchRows
from llmcli.runtime.binding.context import Context
from llmcli.runtime.binding.context_options import ContextOptions
from llmcli.runtime.binding.eval_callback import AttentionMix, ProductInput, ProductWatcher
from llmcli.runtime.binding.model import Model
from llmcli.runtime.binding.open_context import open_context
from llmcli.runtime.engine.forward_pass import TILE_ROWS
from llmcli.runtime.interruptible_pass import interruptible
from llmcli.runtime.scoring.chunk_scorer import max_logit_rows


class Activations:
    """An open context that reads chunks of text, made by `open_activations`."""

    def __init__(self, model: Model, context: Context, watcher: ProductWatcher) -> None:
        self.context, self._watcher = context, watcher
        self.bos = model.bos if model.add_bos else None

    def narrow(self, is_wanted: Callable[[str], bool], last_weight: str) -> None:
        """From now on pass only the products with these weights to the sink, and end every pass at
        the product with `last_weight`.
        """
        self._watcher.narrow(is_wanted, last_weight)

    @property
    def latest_weight(self) -> str:
        """Return the name of the weight whose product was passed to the sink last."""
        return self._watcher.latest_weight

    def read(self, ids: NDArray[np.int32]) -> None:
        """Read one chunk. Every row asks for logits, because otherwise the last block and the head
        would be computed for some rows only.

        Shapes: ids `[n_ctx]`. Raises what the sink raises, and KeyboardInterrupt at Ctrl-C.
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
    """Open a context whose wanted products with weights are passed to `sink`. `options`: those of a
    context for one chunk. Attention weights are passed only without flash attention.
    """
    from dataclasses import replace

    most = min(max_logit_rows(model.n_vocab), options.n_ubatch, options.n_ctx)
    watcher = ProductWatcher(is_wanted, sink)
    with open_context(
        model, replace(options, n_outputs=most // TILE_ROWS * TILE_ROWS or most), watcher.callback
    ) as context:
        yield Activations(model, context, watcher)
