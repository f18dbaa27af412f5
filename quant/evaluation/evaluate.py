"""Perplexity and divergence of a text, chunk by chunk, with llama-perplexity's protocol.

A text is split into chunks of n_ctx tokens that do not overlap. In each, the tokens of the second
half are scored, so that every scored token has at least half a chunk of context
(tools/perplexity/perplexity.cpp: positions n_ctx/2 to n_ctx-2, whose next token is known). The
scorer replaces the first token of a chunk by BOS where the model needs it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from quant.errors import Refusal
from quant.evaluation.divergence import F32, F64, Lanes, Scores, Top, sound

I32 = NDArray[np.int32]
SHORTEST = 8  # fewest tokens of a chunk
NOTHING: F64 = np.empty(0)


@dataclass(frozen=True, slots=True)
class Chunks:
    """A text's tokens, int32 [chunks, n_ctx]."""

    ids: I32

    @property
    def count(self) -> int:
        """Number of chunks."""
        return len(self.ids)

    @property
    def n_ctx(self) -> int:
        """Tokens of a chunk."""
        return int(self.ids.shape[1])

    @property
    def first(self) -> int:
        """First position that is scored."""
        return self.n_ctx // 2

    @property
    def scored(self) -> int:
        """Number of scored positions of a chunk."""
        return self.n_ctx - 1 - self.first

    def targets(self, chunk: int) -> I32:
        """Return the next tokens at a chunk's scored positions."""
        return self.ids[chunk, self.first + 1 :]


def chunks(tokens: Sequence[int], n_ctx: int, most: int | None = None) -> Chunks:
    """Split a text's tokens into chunks. Raises UserError if there are fewer than two chunks, as
    llama-perplexity does.
    """
    if n_ctx < SHORTEST:
        raise Refusal(
            f"--ctx is {n_ctx}", hint=f"--ctx takes a whole number from {SHORTEST}; 512 is usual"
        )
    if len(tokens) < 2 * n_ctx:
        most_ctx = len(tokens) // 2
        hint = f"a longer text, or --ctx {most_ctx}" if most_ctx >= SHORTEST else "a longer text"
        need = f"chunks of {n_ctx} need at least {2 * n_ctx} tokens"
        raise Refusal(f"the text is too short: {need}, it has {len(tokens)}", hint=hint)
    count = len(tokens) // n_ctx
    count = count if most is None else min(most, count)
    return Chunks(np.array(tokens[: count * n_ctx], np.int32).reshape(count, n_ctx))


class Scorer(Protocol):
    """A model that reads chunks and returns logits."""

    def blocks(self, ids: I32) -> Iterator[F32]:
        """Yield the logits of the scored positions of chunks [n, n_ctx], some positions at a time:
        float32 [n, positions, n_vocab], valid until the next block is requested.
        """
        ...


class Kept(Protocol):
    """The stored logits of a base."""

    def rows(self, chunk: int) -> list[Top]:
        """Return the scored positions of one chunk."""
        ...


@dataclass(frozen=True, slots=True)
class Evaluation:
    """One text read by a model, and by a base or its stored logits. With `collect_top`, the
    predictions of the base (without a base, of the model) are also packed for a file of base
    logits.
    """

    model: Scorer
    base: Scorer | None
    kept: Kept | None
    text: Chunks
    lanes: Lanes
    keep: bool = False

    def score(self, numbers: Sequence[int]) -> tuple[list[Scores], list[list[Top]]]:
        """Score the chunks with these `numbers` in one pass each. Returns scores and, if collected,
        the top logits. Raises UserError for logits that are not finite.
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
        assert at == self.text.scored, (at, self.text.scored)
        return [sound(chunk.scores, chunk.number) for chunk in chunks], [
            chunk.tops for chunk in chunks
        ]


class _Chunk:
    """One chunk while its blocks arrive."""

    def __init__(self, evaluation: Evaluation, number: int) -> None:
        self.evaluation, self.number = evaluation, number
        self.targets = evaluation.text.targets(number).tolist()
        self.kept = evaluation.kept.rows(number) if evaluation.kept else None
        self.rows: list[tuple[float, ...]] = []
        self.tops: list[Top] = []

    def add(self, at: int, block: F32, other: F32 | None) -> None:
        """Score the positions from `at` on."""
        lanes, targets, stored = (
            self.evaluation.lanes,
            self.targets[at:],
            self.kept[at:] if self.kept else None,
        )
        if stored is not None:
            self.rows += lanes.map(
                len(block), lambda lane, i: lane.kept(block[i], stored[i], targets[i])
            )
        elif other is not None:
            self.rows += lanes.map(
                len(block), lambda lane, i: lane.against(block[i], other[i], targets[i])
            )
        else:
            self.rows += lanes.map(len(block), lambda lane, i: (lane.plain(block[i], targets[i]),))
        if self.evaluation.keep:
            base = block if other is None else other
            seed = self.number * self.evaluation.text.n_ctx + at
            self.tops += lanes.map(
                len(base), lambda lane, i: lane.top(base[i], targets[i], seed + i)
            )

    @property
    def scores(self) -> Scores:
        columns = [np.array(column, np.float64) for column in zip(*self.rows, strict=True)]
        if len(columns) == 4:
            columns.append(np.zeros(len(self.rows)))
        return Scores(*columns, *[NOTHING] * (5 - len(columns)))
