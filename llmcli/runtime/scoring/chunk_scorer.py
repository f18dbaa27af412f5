"""Computes the logits of the scored positions of text chunks, some rows at a time.

It fits quant's Scorer protocol without importing it. A pass reads several chunks, each in a
separate sequence, as in llama-perplexity. Only scored rows ask for logits, and at most
`max_logit_rows` rows in one pass.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from llmcli.runtime.binding.batch import BatchRows
from llmcli.runtime.binding.context import Context
from llmcli.runtime.binding.context_options import MAX_SEQUENCES, ContextOptions
from llmcli.runtime.binding.logits_matrix import logits_matrix
from llmcli.runtime.binding.logits_row import LogitsRow
from llmcli.runtime.binding.model import Model
from llmcli.runtime.engine.forward_pass import TILE_ROWS
from llmcli.runtime.interruptible_pass import interruptible

LOGITS_BYTES = 128 << 20  # bytes of logits in memory at once


def chunks_per_pass(n_ctx: int, n_batch: int, n_vocab: int, count: int) -> int:
    """Return how many chunks one pass reads, at most `count`. This is as many as fit into a batch,
    as in llama-perplexity, but only as many as LOGITS_BYTES allow for the logits of the scored
    halves.
    """
    return max(
        1,
        min(
            n_batch // n_ctx, max_logit_rows(n_vocab) // (n_ctx - n_ctx // 2), MAX_SEQUENCES, count
        ),
    )


def max_logit_rows(n_vocab: int) -> int:
    """Return the maximum rows of logits that are in memory at once."""
    return max(1, LOGITS_BYTES // (4 * n_vocab))


def chunk_context_options(base: ContextOptions, n_vocab: int, chunks: int) -> ContextOptions:
    """Return options for `chunks` chunks at once, each with a separate stream of cells. `base`: the
    options for one chunk.
    """
    return replace(
        base,
        n_ctx=base.n_ctx * chunks,
        n_seq_max=chunks,
        unified=False,
        n_outputs=min(max_logit_rows(n_vocab), chunks * base.n_ctx),
    )


class ChunkScorer:
    """A scorer of text chunks over one context. Ctrl-C during a pass raises KeyboardInterrupt."""

    def __init__(self, model: Model, context: Context) -> None:
        self.context, self.n_vocab = context, model.n_vocab
        self.bos = model.bos if model.add_bos else None

    def blocks(self, ids: NDArray[np.int32]) -> Iterator[NDArray[np.float32]]:
        """Yield the logits of the second half of each chunk, some positions of all chunks at a
        time. The last position of a chunk is left out, because its next token is unknown.

        Shapes: ids `[chunks, n_ctx]`, blocks float32 `[chunks, positions, n_vocab]`. A block is a
        view that is valid until the next one is requested.
        """
        count, n_ctx = ids.shape
        tokens = ids.copy()
        if self.bos is not None:
            tokens[:, 0] = self.bos
        self.context.clear()
        step = max(1, self.context.n_batch // count)
        for start in range(0, n_ctx // 2, step):
            self._pass(tokens, start, min(start + step, n_ctx // 2), wanted=False)
        step = max(1, min(step, self.context.n_outputs // count))
        step = step // TILE_ROWS * TILE_ROWS or step
        for start in range(n_ctx // 2, n_ctx - 1, step):
            rows = self._pass(tokens, start, min(start + step, n_ctx), wanted=True)
            yield logits_matrix(rows, self.n_vocab).reshape(count, -1, self.n_vocab)

    def _pass(
        self, tokens: NDArray[np.int32], start: int, end: int, wanted: bool
    ) -> Sequence[LogitsRow]:
        count, width = len(tokens), end - start
        rows = BatchRows(
            tokens[:, start:end].ravel().tolist(),
            list(range(start, end)) * count,
            [sequence for sequence in range(count) for _ in range(width)],
            ([wanted] * (width - 1) + [wanted and end < tokens.shape[1]])
            * count,  # the token after the last position is unknown
        )
        with interruptible(self.context):
            return self.context.decode(rows)
