"""Compute the logits of chunks of text, for perplexity and KL divergence. As in llama-perplexity,
only the positions in the second half of a chunk are scored.

`ChunkScorer` fits the protocol Scorer of quant/evaluation without importing it. A pass reads
several chunks, each in its own sequence. Logits are computed only for scored positions, and for at
most `max_logit_rows` of them in one pass, because a row of logits is as long as the vocabulary.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from llmcli.runtime.binding.contexts.context import Context
from llmcli.runtime.binding.contexts.context_options import MAX_SEQUENCES, ContextOptions
from llmcli.runtime.binding.model import Model
from llmcli.runtime.binding.rows.batch import BatchRows
from llmcli.runtime.binding.rows.logits_matrix import logits_matrix
from llmcli.runtime.binding.rows.logits_row import LogitsRow
from llmcli.runtime.engine.forward_pass import TILE_ROWS
from llmcli.runtime.interruptible_pass import interruptible

LOGITS_BYTES = 128 << 20  # bytes of logits in memory at once


def chunks_per_pass(n_ctx: int, n_batch: int, n_vocab: int, count: int) -> int:
    """Return how many chunks to read in one pass, at least 1 and at most `count`.

    As in llama-perplexity, this is the number of chunks of `n_ctx` tokens that fit into a batch of
    `n_batch` tokens. It is lower when the logits of the chunks' scored halves would take more than
    LOGITS_BYTES.
    """
    return max(
        1,
        min(
            n_batch // n_ctx, max_logit_rows(n_vocab) // (n_ctx - n_ctx // 2), MAX_SEQUENCES, count
        ),
    )


def max_logit_rows(n_vocab: int) -> int:
    """Return how many rows of logits, each of `n_vocab` float32 values, fit into LOGITS_BYTES. At
    least 1.
    """
    return max(1, LOGITS_BYTES // (4 * n_vocab))


def chunk_context_options(base: ContextOptions, n_vocab: int, chunks: int) -> ContextOptions:
    """Return the options of a context that reads `chunks` chunks in one pass, each in its own
    sequence with its own KV cells. `base`: the options of a context for a single chunk.
    """
    return replace(
        base,
        n_ctx=base.n_ctx * chunks,
        n_seq_max=chunks,
        unified=False,
        n_outputs=min(max_logit_rows(n_vocab), chunks * base.n_ctx),
    )


class ChunkScorer:
    """Computes the logits of chunks of text in one llama.cpp context. Ctrl-C during a pass raises
    KeyboardInterrupt.
    """

    def __init__(self, model: Model, context: Context) -> None:
        self.context, self.n_vocab = context, model.n_vocab
        self.bos = model.bos if model.add_bos else None

    def blocks(self, ids: NDArray[np.int32]) -> Iterator[NDArray[np.float32]]:
        """Yield the logits of the second half of all chunks. Each block has the next few positions
        of every chunk. The last position of a chunk is left out, because the token after it is
        unknown.

        `ids`: the tokens of the chunks. If the model uses a BOS token, it replaces the first token
        of each chunk.

        Shapes: ids `[chunks, n_ctx]`, blocks float32 `[chunks, positions, n_vocab]`. A block is a
        view that is valid until the next block is requested.
        """
        count, n_ctx = ids.shape
        tokens = ids.copy()
        if self.bos is not None:
            tokens[:, 0] = self.bos
        self.context.clear()
        step = max(1, self.context.n_batch // count)
        for start in range(0, n_ctx // 2, step):
            self._run_pass(tokens, start, min(start + step, n_ctx // 2), gives_logits=False)
        step = max(1, min(step, self.context.n_outputs // count))
        step = step // TILE_ROWS * TILE_ROWS or step
        for start in range(n_ctx // 2, n_ctx - 1, step):
            rows = self._run_pass(tokens, start, min(start + step, n_ctx), gives_logits=True)
            yield logits_matrix(rows, self.n_vocab).reshape(count, -1, self.n_vocab)

    def _run_pass(
        self, tokens: NDArray[np.int32], start: int, end: int, gives_logits: bool
    ) -> Sequence[LogitsRow]:
        """Compute the positions from `start` to `end` of every chunk. Return their rows of logits,
        chunk by chunk. Empty if `gives_logits` is False.

        Shapes: tokens `[chunks, n_ctx]`.
        """
        count, width = len(tokens), end - start
        # the last position of a chunk gives no logits
        chunk_outputs = [gives_logits] * (width - 1) + [gives_logits and end < tokens.shape[1]]
        rows = BatchRows(
            tokens[:, start:end].ravel().tolist(),
            list(range(start, end)) * count,
            [sequence for sequence in range(count) for _ in range(width)],
            chunk_outputs * count,
        )
        with interruptible(self.context):
            return self.context.decode(rows)
