"""Chunks of text through a model: the logits of their scored positions, some rows at a time.

Fits quant's Scorer without importing it. Several chunks go through one pass, each in a sequence of
its own, as llama-perplexity does; only the rows that are scored ask for logits, and never more of
them than `block_rows` allows.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from llmcli.runtime.binding.context import MAX_SEQUENCES, Context, ContextOptions, Rows
from llmcli.runtime.binding.matrix import matrix
from llmcli.runtime.binding.model import Model
from llmcli.runtime.binding.row import Row
from llmcli.runtime.passes import TILE
from llmcli.runtime.stopping import stopped

BLOCK = 128 << 20  # bytes of logits that are held at once


def at_once(n_ctx: int, n_batch: int, n_vocab: int, count: int) -> int:
    """Chunks that one pass takes: as many as a batch holds, as llama-perplexity, where their scored
    halves fit into a block, and no more than there are.
    """
    return max(
        1, min(n_batch // n_ctx, block_rows(n_vocab) // (n_ctx - n_ctx // 2), MAX_SEQUENCES, count)
    )


def block_rows(n_vocab: int) -> int:
    """Rows of logits that are held at once."""
    return max(1, BLOCK // (4 * n_vocab))


def context_options(base: ContextOptions, n_vocab: int, chunks: int) -> ContextOptions:
    """`base` (whose n_ctx is a chunk's) for so many chunks at once: a stream of cells for each."""
    return replace(
        base,
        n_ctx=base.n_ctx * chunks,
        n_seq_max=chunks,
        unified=False,
        n_outputs=min(block_rows(n_vocab), chunks * base.n_ctx),
    )


class ChunkScorer:
    """One context that reads chunks. Ctrl-C in the middle of a pass raises KeyboardInterrupt."""

    def __init__(self, model: Model, context: Context) -> None:
        self.context, self.n_vocab = context, model.n_vocab
        self.bos = model.bos if model.add_bos else None

    def blocks(self, ids: NDArray[np.int32]) -> Iterator[NDArray[np.float32]]:
        """The logits of the second halves of chunks [n, n_ctx], without the last position's:
        float32 [n, positions, n_vocab], a view that is valid until the next is asked for.
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
        step = step // TILE * TILE or step
        for start in range(n_ctx // 2, n_ctx - 1, step):
            rows = self._pass(tokens, start, min(start + step, n_ctx), wanted=True)
            yield matrix(rows, self.n_vocab).reshape(count, -1, self.n_vocab)

    def _pass(self, tokens: NDArray[np.int32], start: int, end: int, wanted: bool) -> Sequence[Row]:
        count, width = len(tokens), end - start
        rows = Rows(
            tokens[:, start:end].ravel().tolist(),
            list(range(start, end)) * count,
            [sequence for sequence in range(count) for _ in range(width)],
            ([wanted] * (width - 1) + [wanted and end < tokens.shape[1]])
            * count,  # behind the last nothing is known
        )
        with stopped(self.context):
            return self.context.decode(rows)
