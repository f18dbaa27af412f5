"""Perplexity and divergence of a text, chunk by chunk, as llama-perplexity computes them.

A text is split into chunks of n_ctx tokens that do not overlap. In each chunk the tokens of the
second half are scored, so that every scored token has at least half a chunk of context
(tools/perplexity/perplexity.cpp: positions n_ctx/2 to n_ctx-2, whose next tokens are known). The
scorer replaces the first token of a chunk by BOS if the model needs it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from quant.errors import UserError
from quant.evaluation.divergence import (
    F32,
    F64,
    PositionScores,
    ThreadedScorer,
    TopLogits,
    require_finite,
)

I32 = NDArray[np.int32]
MIN_CHUNK_TOKENS = 8  # fewest tokens in a chunk
EMPTY_SCORES: F64 = np.empty(0)


@dataclass(frozen=True, slots=True)
class TextChunks:
    """A text's tokens, int32 [chunks, n_ctx]."""

    ids: I32

    @property
    def count(self) -> int:
        """Number of chunks."""
        return len(self.ids)

    @property
    def n_ctx(self) -> int:
        """Number of tokens in a chunk."""
        return int(self.ids.shape[1])

    @property
    def first_scored(self) -> int:
        """The first position of a chunk that is scored."""
        return self.n_ctx // 2

    @property
    def scored_count(self) -> int:
        """Number of scored positions in a chunk."""
        return self.n_ctx - 1 - self.first_scored

    def targets(self, chunk: int) -> I32:
        """Return the next token at each scored position of a chunk."""
        return self.ids[chunk, self.first_scored + 1 :]


def split_text(tokens: Sequence[int], n_ctx: int, max_chunks: int | None = None) -> TextChunks:
    """Split a text's tokens into chunks. Raises UserError if there are fewer than two chunks, as
    llama-perplexity does.
    """
    if n_ctx < MIN_CHUNK_TOKENS:
        raise UserError(
            f"--ctx is {n_ctx}",
            hint=f"--ctx takes a whole number from {MIN_CHUNK_TOKENS}; 512 is usual",
        )
    if len(tokens) < 2 * n_ctx:
        most_ctx = len(tokens) // 2
        hint = (
            f"a longer text, or --ctx {most_ctx}"
            if most_ctx >= MIN_CHUNK_TOKENS
            else "a longer text"
        )
        need = f"chunks of {n_ctx} need at least {2 * n_ctx} tokens"
        raise UserError(f"the text is too short: {need}, it has {len(tokens)}", hint=hint)
    count = len(tokens) // n_ctx
    count = count if max_chunks is None else min(max_chunks, count)
    return TextChunks(np.array(tokens[: count * n_ctx], np.int32).reshape(count, n_ctx))


class ChunkReader(Protocol):
    """A model that reads chunks and returns logits."""

    def blocks(self, ids: I32) -> Iterator[F32]:
        """Yield the logits at the scored positions of chunks `ids` [n, n_ctx], some positions at a
        time, as float32 [n, positions, n_vocab]. A yielded array is valid until the next one is
        requested.
        """
        ...


class BaseLogits(Protocol):
    """The stored logits of a base."""

    def rows(self, chunk: int) -> list[TopLogits]:
        """Return the stored rows at the scored positions of one chunk."""
        ...


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The evaluation of a text by a model, and by a base or a base's stored logits if there is one.

    With `collect_top`, the likeliest tokens of the base are also collected for a file of base
    logits, or those of the model if there is no base.
    """

    model: ChunkReader
    base: ChunkReader | None
    base_logits: BaseLogits | None
    text: TextChunks
    scorer: ThreadedScorer
    collect_top: bool = False

    def score(self, numbers: Sequence[int]) -> tuple[list[PositionScores], list[list[TopLogits]]]:
        """Score the chunks `numbers`, which each model reads in one pass. Return the scores and the
        collected top logits of each chunk. Raises UserError for logits that are not finite.
        """
        ids = self.text.ids[list(numbers)]
        base_blocks = self.base.blocks(ids) if self.base else None
        chunks = [_Chunk(self, number) for number in numbers]
        at = 0
        for block in self.model.blocks(ids):
            base_block = next(base_blocks) if base_blocks else None
            for row, chunk in enumerate(chunks):
                chunk.add(at, block[row], None if base_block is None else base_block[row])
            at += block.shape[1]
        assert at == self.text.scored_count, (at, self.text.scored_count)
        return [require_finite(chunk.scores, chunk.number) for chunk in chunks], [
            chunk.tops for chunk in chunks
        ]


class _Chunk:
    """The scores of one chunk, collected block by block."""

    def __init__(self, evaluation: Evaluation, number: int) -> None:
        self.evaluation, self.number = evaluation, number
        self.targets = evaluation.text.targets(number).tolist()
        self.kept = evaluation.base_logits.rows(number) if evaluation.base_logits else None
        self.rows: list[tuple[float, ...]] = []
        self.tops: list[TopLogits] = []

    def add(self, at: int, block: F32, other: F32 | None) -> None:
        """Score a block of positions, of which `at` is the first; `other` are the base's logits."""
        lanes, targets, stored = (
            self.evaluation.scorer,
            self.targets[at:],
            self.kept[at:] if self.kept else None,
        )
        if stored is not None:
            self.rows += lanes.map(
                len(block), lambda lane, i: lane.compare_to_top(block[i], stored[i], targets[i])
            )
        elif other is not None:
            self.rows += lanes.map(
                len(block), lambda lane, i: lane.compare(block[i], other[i], targets[i])
            )
        else:
            self.rows += lanes.map(len(block), lambda lane, i: (lane.score(block[i], targets[i]),))
        if self.evaluation.collect_top:
            base = block if other is None else other
            seed = self.number * self.evaluation.text.n_ctx + at
            self.tops += lanes.map(
                len(base), lambda lane, i: lane.select_top(base[i], targets[i], seed + i)
            )

    @property
    def scores(self) -> PositionScores:
        columns = [np.array(column, np.float64) for column in zip(*self.rows, strict=True)]
        if len(columns) == 4:
            columns.append(np.zeros(len(self.rows)))
        return PositionScores(*columns, *[EMPTY_SCORES] * (5 - len(columns)))
