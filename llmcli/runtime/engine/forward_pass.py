"""The rows of one forward pass, and the sequences that they belong to."""

from dataclasses import dataclass, field
from typing import NamedTuple

from llmcli.runtime.kv_cache.context_protocols import BatchedMemory
from llmcli.runtime.kv_cache.ledger import Ledger
from llmcli.runtime.requests.sequence import Sequence

MIN_ABORT_ROWS = 64  # minimum rows of a cancelled sequence for which the running pass is aborted
# Rows from which ggml's CPU flash attention computes in tiles (ggml-cpu/ops.cpp, use_tiled). Fewer
# rows round differently and are much slower: 63 rows took eight times as long as 64.
TILE_ROWS = 64


def choose_prefill_rows(
    n_left: int, free_rows: int, used_rows: int, n_batch: int, n_ubatch: int
) -> int:
    """Return how many of a prompt's `n_left` remaining tokens to add to a pass that has `used_rows`
    rows already and `free_rows` rows left.

    llama.cpp splits a pass of at most `n_batch` rows into micro-batches of `n_ubatch` rows. Neither
    the rest of the prompt nor the last micro-batch should have fewer rows than a tile, because
    those rows would be computed one by one. The result may therefore exceed `free_rows` by up to a
    tile.
    """
    count = n_left if n_left < free_rows + TILE_ROWS else free_rows
    count = min(count, n_batch - used_rows)
    if 0 < n_left - count < TILE_ROWS < n_left:
        count = n_left - TILE_ROWS
    rows = used_rows + count
    if rows > n_ubatch and 0 < rows % n_ubatch < TILE_ROWS < count:
        count -= TILE_ROWS
    return count


class SequenceRows(NamedTuple):
    """The share of one sequence in a pass: the number of its tokens (or branches), and how many of
    its rows give logits.
    """

    sequence: Sequence
    tokens: int
    n_logits: int


@dataclass(slots=True)
class ForwardPass:
    """The rows of one forward pass, and how many of them each sequence owns, in order."""

    tokens: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    wants_logits: list[bool] = field(default_factory=list)
    shares: list[SequenceRows] = field(default_factory=list)

    def add(
        self,
        sequence: Sequence,
        count: int,
        context: BatchedMemory,
        ledger: Ledger,
        is_alone: bool,
    ) -> None:
        """Add the next `count` tokens of a sequence, followed by its draft. If all its tokens are
        computed, add its branches instead.

        The draft is shortened to the free cells and rows, because nothing is evicted for a guess.
        If other sequences run, the draft is dropped.
        """
        if sequence.n_computed == len(sequence.tokens):
            self.add_branches(sequence, ledger)
            return
        if sequence.draft:
            rows = len(self.tokens) + count
            n_free = min(
                context.n_ctx - len(sequence.tokens),
                ledger.size - ledger.used_cells - rows,
                context.n_batch - rows,
                context.n_outputs - 1,
            )
            del sequence.draft[max(0, n_free) if is_alone else 0 :]
        self.add_tokens(sequence, count)

    def add_tokens(self, sequence: Sequence, count: int) -> None:
        """Add the next `count` tokens of a sequence, with its draft after the last one."""
        start = sequence.n_computed
        self.tokens += sequence.tokens[start : start + count]
        self.positions += range(start, start + count)
        self.slots += [sequence.slot] * count
        ends = start + count == len(sequence.tokens)
        scored = sequence.positions_to_score(start, start + count)
        wants = [False] * (count - 1) + [ends]
        for at in scored:
            wants[at - start] = True
        self.wants_logits += wants
        if ends and sequence.draft:
            self._guess(sequence)
        self.shares.append(
            SequenceRows(sequence, count, len(scored) + (1 + len(sequence.draft) if ends else 0))
        )

    def is_mostly(self, sequence: Sequence) -> bool:
        """Return whether much of the pass belongs to the sequence: at least MIN_ABORT_ROWS rows and
        at least half of all rows.
        """
        rows = next((share.tokens for share in self.shares if share.sequence is sequence), 0)
        return rows >= max(MIN_ABORT_ROWS, len(self.tokens) / 2)

    def _guess(self, sequence: Sequence) -> None:
        """Add the rows of a sequence's draft, which follow its tokens."""
        end, count = len(sequence.tokens), len(sequence.draft)
        self.tokens += sequence.draft
        self.positions += range(end, end + count)
        self.slots += [sequence.slot] * count
        self.wants_logits += [True] * count

    def add_branches(self, sequence: Sequence, ledger: Ledger) -> None:
        """Add one row for each branch of a sequence, after the tokens that the branch's slot holds."""
        pending = sequence.strategy.pending_rows()
        self.slots += [slot for slot, _ in pending]
        self.tokens += [token for _, token in pending]
        self.positions += [len(ledger.tokens[slot]) for slot, _ in pending]
        self.wants_logits += [True] * len(pending)
        self.shares.append(SequenceRows(sequence, len(pending), len(pending)))
