"""Perplexity and divergence of a text, chunk by chunk, as llama-perplexity computes them.

A text is split into chunks of n_ctx tokens that do not overlap. In each chunk the tokens of the
second half are scored, so that every scored token has at least half a chunk of context
(tools/perplexity/perplexity.cpp: positions n_ctx/2 to n_ctx-2, whose next tokens are known). The
first token of a chunk is replaced by BOS if the model needs BOS; the ChunkReader does this.
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
MIN_CHUNK_TOKENS = 8  # minimum number of tokens in a chunk
EMPTY_SCORES: F64 = np.empty(0)


@dataclass(frozen=True, slots=True)
class TextChunks:
    """A text's tokens, split into chunks: `ids` is int32 [chunks, n_ctx]."""

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
        """The first position of each chunk that is scored."""
        return self.n_ctx // 2

    @property
    def scored_count(self) -> int:
        """Number of scored positions in a chunk."""
        return self.n_ctx - 1 - self.first_scored

    def targets(self, chunk: int) -> I32:
        """Return the token that follows each scored position of a chunk."""
        return self.ids[chunk, self.first_scored + 1 :]


def split_text(tokens: Sequence[int], n_ctx: int, max_chunks: int | None = None) -> TextChunks:
    """Split a text's tokens into chunks of `n_ctx` tokens, at most `max_chunks`. Tokens after the
    last whole chunk are dropped. Raises UserError if the text has fewer than two chunks, as
    llama-perplexity does.
    """
    if n_ctx < MIN_CHUNK_TOKENS:
        raise UserError(
            f"--ctx is {n_ctx}",
            hint=f"--ctx takes a whole number from {MIN_CHUNK_TOKENS}; 512 is usual",
        )
    if len(tokens) < 2 * n_ctx:
        largest_ctx = len(tokens) // 2
        hint = (
            f"a longer text, or --ctx {largest_ctx}"
            if largest_ctx >= MIN_CHUNK_TOKENS
            else "a longer text"
        )
        need = f"chunks of {n_ctx} need at least {2 * n_ctx} tokens"
        raise UserError(f"the text is too short: {need}, it has {len(tokens)}", hint=hint)
    count = len(tokens) // n_ctx
    count = count if max_chunks is None else min(max_chunks, count)
    return TextChunks(np.array(tokens[: count * n_ctx], np.int32).reshape(count, n_ctx))


class ChunkReader(Protocol):
    """A model that reads chunks of tokens and returns its logits."""

    def blocks(self, ids: I32) -> Iterator[F32]:
        """Yield the logits at the scored positions of the chunks `ids` [n, n_ctx], as float32 [n,
        positions, n_vocab]. Each array has some of the positions, in order, and is valid until the
        next array is requested.
        """
        ...


class BaseLogits(Protocol):
    """The predictions of a base model, which an earlier evaluation has stored."""

    def rows(self, chunk: int) -> list[TopLogits]:
        """Return the stored prediction at each scored position of a chunk."""
        ...


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The evaluation of a model on a text. The model is compared with `base`, a second model that
    reads the same text, or with `base_logits`, a base's stored predictions. Both are None if there
    is no base.

    With `collect_top`, the likeliest tokens of the base are also collected, or those of the model
    if there is no base. They are needed to write a file of base logits.
    """

    model: ChunkReader
    base: ChunkReader | None
    base_logits: BaseLogits | None
    text: TextChunks
    scorer: ThreadedScorer
    collect_top: bool = False

    def score(self, numbers: Sequence[int]) -> tuple[list[PositionScores], list[list[TopLogits]]]:
        """Score the chunks with these numbers, which each model reads at the same time. Return the
        scores of each chunk, and the collected predictions of each chunk (empty without
        `collect_top`). Raises UserError for logits that are not finite.
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
    """The scores of one chunk, to which blocks of positions are added in order."""

    def __init__(self, evaluation: Evaluation, number: int) -> None:
        self.evaluation, self.number = evaluation, number
        self.targets = evaluation.text.targets(number).tolist()
        self.base_rows = evaluation.base_logits.rows(number) if evaluation.base_logits else None
        self.rows: list[tuple[float, ...]] = []
        self.tops: list[TopLogits] = []

    def add(self, at: int, block: F32, base_block: F32 | None) -> None:
        """Score a block of positions, of which `at` is the first. `block` and `base_block` are the
        logits of the model and of the base [positions, n_vocab].
        """
        scorers, targets = self.evaluation.scorer, self.targets[at:]
        base_rows = self.base_rows[at:] if self.base_rows else None
        if base_rows is not None:
            self.rows += scorers.map(
                len(block),
                lambda scorer, i: scorer.compare_to_top(block[i], base_rows[i], targets[i]),
            )
        elif base_block is not None:
            self.rows += scorers.map(
                len(block), lambda scorer, i: scorer.compare(block[i], base_block[i], targets[i])
            )
        else:
            self.rows += scorers.map(
                len(block), lambda scorer, i: (scorer.score(block[i], targets[i]),)
            )
        if self.evaluation.collect_top:
            stored_block = block if base_block is None else base_block
            seed = self.number * self.evaluation.text.n_ctx + at
            self.tops += scorers.map(
                len(stored_block),
                lambda scorer, i: scorer.select_top(stored_block[i], targets[i], seed + i),
            )

    @property
    def scores(self) -> PositionScores:
        """The scores of all positions; fields that were not computed are empty."""
        columns = [np.array(column, np.float64) for column in zip(*self.rows, strict=True)]
        if len(columns) == 4:
            columns.append(np.zeros(len(self.rows)))
        return PositionScores(*columns, *[EMPTY_SCORES] * (5 - len(columns)))
