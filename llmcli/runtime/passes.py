"""One forward pass while it is put together: its rows, and whose they are."""

from dataclasses import dataclass, field
from typing import NamedTuple

from llmcli.runtime.ledger import Ledger
from llmcli.runtime.sequence import Sequence

LONG = 64  # rows of one sequence whose computing is worth breaking off
# Rows from which on the CPU goes by tiles in flash attention (ggml-cpu/ops.cpp, use_tiled). Fewer
# round otherwise: Gemma 3 270M in Q3_K_S, perplexity in passes of 16 rows 0.09 % off that of whole
# chunks, in passes of 128 the same to eight digits. And it is slow: SmolLM2-135M behind 600 tokens,
# 63 rows took eight times as long as 64 (2026-11).
TILE = 64


def piece(left: int, room: int, before: int, most: int, micro: int) -> int:
    """How many of the `left` tokens of a prompt go into a pass that has `before` rows and `room`
    for more, at best.

    Neither what is left nor the last micro-batch (llama.cpp cuts a pass of at most `most` rows into
    those of `micro`) shall have fewer rows than a tile: 512 rows took 429 ms, 543 rows 737, since
    the last 31 go one by one (SmolLM2-135M, two threads, 2026-11-22). So it may take a tile more
    than there is room for.
    """
    count = left if left < room + TILE else room
    count = min(count, most - before)
    if 0 < left - count < TILE < left:
        count = left - TILE
    rows = before + count
    if rows > micro and 0 < rows % micro < TILE < count:
        count -= TILE
    return count


class Share(NamedTuple):
    """A sequence's part of a pass: how many of its tokens (or branches), and how many of the rows
    give logits.
    """

    sequence: Sequence
    tokens: int
    wanted: int


@dataclass(slots=True)
class Pass:
    """One pass: its rows, and how many of them each sequence owns (in order)."""

    tokens: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    wants: list[bool] = field(default_factory=list)
    shares: list[Share] = field(default_factory=list)

    def add(self, sequence: Sequence, count: int) -> None:
        start = sequence.computed
        self.tokens += sequence.tokens[start : start + count]
        self.positions += range(start, start + count)
        self.slots += [sequence.slot] * count
        last = start + count == len(sequence.tokens)
        read = sequence.unscored(start, start + count)
        wants = [False] * (count - 1) + [last]
        for at in read:
            wants[at - start] = True
        self.wants += wants
        if last and sequence.draft:
            self._guess(sequence)
        self.shares.append(
            Share(sequence, count, len(read) + (1 + len(sequence.draft) if last else 0))
        )

    def mostly(self, sequence: Sequence) -> bool:
        """Whether it is long, and at least half of it one sequence's."""
        rows = next((share.tokens for share in self.shares if share.sequence is sequence), 0)
        return rows >= max(LONG, len(self.tokens) / 2)

    def _guess(self, sequence: Sequence) -> None:
        """The rows of a draft, behind its sequence's tokens."""
        end, count = len(sequence.tokens), len(sequence.draft)
        self.tokens += sequence.draft
        self.positions += range(end, end + count)
        self.slots += [sequence.slot] * count
        self.wants += [True] * count

    def branch(self, sequence: Sequence, ledger: Ledger) -> None:
        """A row for each branch of a sequence, behind what its slot holds."""
        pending = sequence.strategy.pending()
        self.slots += [slot for slot, _ in pending]
        self.tokens += [token for _, token in pending]
        self.positions += [len(ledger.tokens[slot]) for slot, _ in pending]
        self.wants += [True] * len(pending)
        self.shares.append(Share(sequence, len(pending), len(pending)))
