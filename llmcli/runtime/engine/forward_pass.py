"""The plan of one forward pass: its rows, and the sequences that they belong to."""

from dataclasses import dataclass, field
from typing import NamedTuple

from llmcli.runtime.kv_cache.context_protocols import BatchedMemory
from llmcli.runtime.kv_cache.ledger import Ledger
from llmcli.runtime.requests.sequence import Sequence

# Rows from which ggml's CPU flash attention computes in tiles (ggml-cpu/ops.cpp, use_tiled). Fewer
# rows are computed one by one, which rounds differently and is much slower.
TILE_ROWS = 64


def choose_prefill_rows(
    n_left: int, free_rows: int, used_rows: int, n_batch: int, n_ubatch: int
) -> int:
    """Return how many of a prompt's `n_left` remaining tokens to add to a pass. `free_rows`: rows
    that the prompt may get. `used_rows`: rows that the pass has already.

    llama.cpp splits a pass of at most `n_batch` rows into micro-batches of `n_ubatch` rows. Neither
    the rest of the prompt nor the last micro-batch should have fewer rows than a tile, because
    those rows would be computed one by one. Therefore the result may exceed `free_rows` by up to a
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
    """The rows of one sequence in a pass. `tokens`: the number of its tokens, or of its branches,
    without drafted tokens. `n_logits`: how many rows of logits it gets.
    """

    sequence: Sequence
    tokens: int
    n_logits: int


@dataclass(slots=True)
class ForwardPass:
    """The plan of a forward pass. `tokens`, `positions`, `slots` and `wants_logits` have one entry
    per row, and `shares` has one per sequence, in the same order. `branches`: as in BatchRows.
    """

    tokens: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    wants_logits: list[bool] = field(default_factory=list)
    shares: list[SequenceRows] = field(default_factory=list)
    branches: list[tuple[int, ...]] = field(default_factory=list)

    def add(
        self,
        sequence: Sequence,
        count: int,
        context: BatchedMemory,
        ledger: Ledger,
        is_alone: bool,
    ) -> None:
        """Add the next `count` tokens of a sequence, and its draft if these are its last. If all
        its tokens are computed, add a row for each of its branches instead.

        The draft is shortened to the free cells and rows, because nothing is evicted for tokens
        that may be wrong. If other sequences run (`is_alone` is False), the draft is dropped.
        """
        if sequence.n_computed == len(sequence.tokens):
            self.add_branches(sequence, ledger)
            return
        if sequence.draft:
            rows = len(self.tokens) + count
            n_free = min(
                sequence.max_tokens - len(sequence.tokens),
                ledger.size - ledger.used_cells - rows,
                context.n_batch - rows,
                context.n_outputs - 1,
            )
            sequence.draft = sequence.draft.shorten(n_free if is_alone else 0)
        self.add_tokens(sequence, count)

    def add_tokens(self, sequence: Sequence, count: int) -> None:
        """Add the next `count` tokens of a sequence. If the last of them is the sequence's last
        token, add also its draft.
        """
        start = sequence.n_computed
        is_next = start + 1 == len(sequence.tokens) and not sequence.is_prefilling
        if is_next and not sequence.draft:
            # a shortcut for the next token of an answer, because a pass may have many of these
            self.tokens.append(sequence.tokens[start])
            self.positions.append(start)
            self.slots.append(sequence.slot)
            self.wants_logits.append(True)
            self.shares.append(SequenceRows(sequence, 1, 1))
            return
        self.tokens += sequence.tokens[start : start + count]
        self.positions += range(start, start + count)
        self.slots += [sequence.slot] * count
        is_end = start + count == len(sequence.tokens)
        scored = sequence.positions_to_score(start, start + count)
        wants = [False] * (count - 1) + [is_end]
        for position in scored:
            wants[position - start] = True
        self.wants_logits += wants
        if is_end and sequence.draft:
            self._add_draft(sequence)
        self.shares.append(
            SequenceRows(sequence, count, len(scored) + (1 + len(sequence.draft) if is_end else 0))
        )

    @property
    def cancelled_rows(self) -> int:
        """Return the number of rows that belong to cancelled sequences, without drafted tokens."""
        return sum(share.tokens for share in self.shares if share.sequence.is_cancelled)

    def _add_draft(self, sequence: Sequence) -> None:
        """Add the rows of a sequence's draft. Each of them gives logits, with which the next
        drafted token is checked. If the draft has several paths, the sequence is alone in the pass.
        """
        end, draft = len(sequence.tokens), sequence.draft
        if not draft.is_chain:
            everywhere = tuple(range(len(draft.leaves())))
            self.branches += [everywhere] * len(self.tokens) + draft.branches()
        self.tokens += draft.tokens
        self.positions += [end + depth for depth in draft.depths()]
        self.slots += [sequence.slot] * len(draft)
        self.wants_logits += [True] * len(draft)

    def add_branches(self, sequence: Sequence, ledger: Ledger) -> None:
        """Add one row for each branch of a beam search. It continues the tokens in the branch's
        slot.
        """
        pending = sequence.strategy.pending_rows()
        self.slots += [slot for slot, _ in pending]
        self.tokens += [token for _, token in pending]
        self.positions += [len(ledger.tokens[slot]) for slot, _ in pending]
        self.wants_logits += [True] * len(pending)
        self.shares.append(SequenceRows(sequence, len(pending), len(pending)))
