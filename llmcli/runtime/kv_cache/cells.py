"""Records which cell of the KV cache holds which token of which slot, and keeps this record equal
to the memory when slots share, move or drop cells.

A slot is a llama.cpp sequence id. Cells are numbered in the order in which they are filled. If two
slots share cells, these are the cells of a common prefix.
"""

from collections.abc import Sequence

from llmcli.errors import UserError
from llmcli.runtime.kv_cache import common_prefix
from llmcli.runtime.kv_cache.checkpoints import Checkpoint, Checkpoints
from llmcli.runtime.kv_cache.context_protocols import CacheMemory
from llmcli.runtime.kv_cache.prefix_match import PrefixMatch
from llmcli.runtime.kv_cache.radix_tree import RadixTree


class CellMap:
    """The tokens of every slot, and the number of the cell of each token. Its methods change the
    memory and this record together. Only `append` and `append_shared` record changes that the
    memory has made already.
    """

    def __init__(self, memory: CacheMemory, is_busy: Sequence[bool]) -> None:
        """`is_busy`: for each slot, whether an answer runs in it. It may only be changed by
        `SlotTable`, between `count_busy` and `uncount_busy`.
        """
        count = memory.n_seq_max
        self.memory, self.is_busy = memory, is_busy
        self.tokens: list[list[int]] = [[] for _ in range(count)]
        self.cells: list[list[int]] = [[] for _ in range(count)]
        self.checkpoints = Checkpoints(count)
        self._prefixes = RadixTree()
        self.used_cells = 0  # cells that hold a token; a shared cell counts once
        self.busy_cells = 0  # the same for the cells of busy slots
        # how often tokens were removed from a slot or shared with it; appending does not count
        self.generation = 0
        self._next_cell = 0

    @property
    def size(self) -> int:
        """Return the number of cells in the pool."""
        return self.memory.n_ctx

    @property
    def can_fork(self) -> bool:
        """Return whether slots may share the cells of a prefix and diverge after any token. They
        cannot with recurrent state, which can only be copied at its end. Nor can they with a
        sliding window smaller than the pool, because shared cells would never leave the window.
        Such slots diverge at checkpoints (`copy_prefix`).
        """
        return not self.memory.is_recurrent and (
            not self.memory.n_swa or self.size <= self.memory.n_swa
        )

    def count_cells(self, slots: Sequence[int]) -> int:
        """Return the number of cells that these slots use together. A shared cell counts once."""
        return sum(
            len(self.cells[slot])
            - max((self.count_shared(slot, other) for other in slots[:at]), default=0)
            for at, slot in enumerate(slots)
        )

    def append(self, slot: int, tokens: list[int]) -> None:
        """Record that a forward pass has added these tokens to a slot."""
        # Nearly every pass appends one token per sequence. For a single token, append() is faster.
        if len(tokens) == 1:
            self.tokens[slot].append(tokens[0])
            self.cells[slot].append(self._next_cell)
        else:
            self.tokens[slot] += tokens
            self.cells[slot] += range(self._next_cell, self._next_cell + len(tokens))
        self._next_cell += len(tokens)
        self.used_cells += len(tokens)
        if self.is_busy[slot]:
            self.busy_cells += len(tokens)

    def keep_branch(self, slot: int, keep: int, branch: int, tokens: list[int]) -> None:
        """Replace the tokens of a slot after its first `keep` by those of a branch of the last
        pass, `tokens`. The memory must be one whose slots can be cut everywhere.
        """
        self.trim(slot, keep)
        assert len(self.tokens[slot]) == keep, "a memory that cannot be cut"
        self.memory.keep_branch(slot, branch, keep, keep + len(tokens))
        self.append(slot, tokens)

    def fork(self, source: int, target: int) -> None:
        """Make `target` a copy of `source` that shares all its cells. Cells that both already share
        are not copied again. If the memory cannot share all of them, a part of its state is copied.
        """
        if not self.can_fork:
            self._copy_slot(source, target)
            return
        n_shared = self.count_shared(source, target)
        self.trim(target, n_shared)
        assert len(self.tokens[target]) == n_shared, "a memory that cannot be forked"
        self.share(source, target, n_shared, len(self.tokens[source]))

    def _copy_slot(self, source: int, target: int) -> None:
        """Make `target` a copy of `source`, whose memory cannot be shared at every token."""
        self.trim(target, 0)
        length = len(self.tokens[source])
        if not length:
            return
        if self.memory.is_recurrent:  # llama.cpp copies the state when one of both continues
            self.memory.copy(source, target, 0, length)
        else:
            state = self.memory.read_checkpoint(source)
            is_copied = self.memory.restore_checkpoint(target, state, length, source)
            assert is_copied, "a window that the memory has just written"
        self._add_shared(source, target, 0, length)

    def copy_prefix(self, source: int, target: int, length: int) -> bool:
        """Give an empty slot the first `length` tokens of another one, which has a checkpoint
        there. Return False, with the slot empty, when the memory refuses the checkpoint.
        """
        checkpoint = self.checkpoints.nearest(source, length)
        assert checkpoint and checkpoint.length == length, (source, length)
        if not self.memory.restore_checkpoint(target, checkpoint.state, length, source):
            return False
        self._add_shared(source, target, 0, length)
        return True

    def restore(self, slot: int) -> None:
        """After an interrupted pass, drop the cells of tokens that were not recorded. If the memory
        cannot be cut there, the slot is set back to its last checkpoint, or emptied.
        """
        keep = len(self.tokens[slot])
        if not self.memory.trim(slot, keep) or not self.window_holds(slot, keep):
            self._cut_record(slot, self._restore_checkpoint(slot, keep))

    def check(self) -> None:
        """Assert that this record agrees with llama.cpp's positions. Used by tests."""
        for slot, tokens in enumerate(self.tokens):
            assert len(tokens) == len(self.cells[slot])
            assert self.memory.last_position(slot) == len(tokens) - 1, (
                slot,
                self.memory.last_position(slot),
                len(tokens),
            )
        assert self.used_cells == len({cell for cells in self.cells for cell in cells}), (
            self.used_cells
        )
        assert self.used_cells <= self.size, (self.used_cells, self.size)
        busy = [slot for slot, is_busy in enumerate(self.is_busy) if is_busy]
        assert self.busy_cells == self.count_cells(busy), (self.busy_cells, busy)

    def share(self, source: int, target: int, start: int, end: int) -> None:
        """Append the tokens from `start` to `end` of `source` to `target`, in shared cells.
        `target` must hold `start` tokens.
        """
        if start < end:
            self.memory.copy(source, target, start, end)
            self._add_shared(source, target, start, end)

    def append_shared(self, source: int, target: int, count: int) -> None:
        """Record that an empty slot now shares the first `count` cells of `source`. The memory must
        share them already.
        """
        self._add_shared(source, target, 0, count)

    def _add_shared(self, source: int, target: int, start: int, end: int) -> None:
        """Record that `target` now ends with the cells from `start` to `end` of `source`."""
        self.generation += 1
        n_busy = self._busy_part(target)
        self.checkpoints.share(source, target, end)
        self.tokens[target] += self.tokens[source][start:end]
        self.cells[target] += self.cells[source][start:end]
        self.busy_cells += self._busy_part(target) - n_busy

    def shift(self, slot: int, start: int, end: int) -> None:
        """Drop the tokens from `start` to `end` of a slot, and move its later cells toward the
        start to close the gap. The cells that move must not be shared with another slot.

        Raises UserError, with all slots empty, when the memory fails to move the cells.
        """
        tokens, cells = self.tokens[slot], self.cells[slot]
        others = (other for other in range(len(self.cells)) if other != slot)
        n_shared = max((self.count_shared(slot, other) for other in others), default=0)
        try:
            self.memory.shift(slot, start, end, tokens[-1])
        except UserError:
            self._clear()
            raise
        self.generation += 1
        n_busy = self._busy_part(slot)
        self.used_cells -= end - max(start, n_shared)
        del tokens[start:end], cells[start:end]
        self.busy_cells += self._busy_part(slot) - n_busy
        self._prefixes.truncate(slot, start)
        self.checkpoints.cut(slot, start)

    def empty_memory(self, slot: int) -> None:
        """Drop all cells of a slot from the memory. This record is not changed."""
        is_empty = self.memory.trim(slot, 0)
        assert is_empty, "a memory that cannot be emptied"

    def match(
        self, tokens: Sequence[int], scopes: Sequence[str], scope: str
    ) -> tuple[int, set[int]]:
        """Return the length of the longest prefix of `tokens` in a slot of `scope`, and the slots
        that hold this prefix. `scopes`: the scope of each slot.
        """
        self._extend_tree(scopes)
        return self._prefixes.match(tokens, scope)

    def update_match(
        self, match: PrefixMatch, prompt: Sequence[int], scopes: Sequence[str], scope: str
    ) -> None:
        """Bring the match of a prompt up to date. The last token of the prompt does not count, and
        the arguments are the same in all calls with one match. `scopes`, `scope`: as in `match`.
        """
        if match.is_current(self.generation, prompt, self.tokens):
            return
        self._extend_tree(scopes)
        found = self._prefixes.prefixes(prompt, scope, len(prompt) - 1)
        match.length, holders = found[0] if found else (0, set[int]())
        match.holders, match.generation = frozenset(holders), self.generation
        match.open_ends = {slot: 0 for slot, tokens in enumerate(self.tokens) if not tokens}
        for length, holders in found:
            match.open_ends |= {
                slot: length for slot in holders if len(self.tokens[slot]) == length
            }

    def _extend_tree(self, scopes: Sequence[str]) -> None:
        """Add the tokens to the radix tree that were appended since the last lookup."""
        for slot, recorded in enumerate(self.tokens):
            if len(recorded) > self._prefixes.length(slot):
                self._prefixes.extend(slot, recorded, scopes[slot])

    def is_redundant(self, slot: int) -> bool:
        """Return whether another slot also holds all tokens of this slot. Return False also when
        this is unknown because the radix tree is not up to date.
        """
        is_known = self._prefixes.length(slot) == len(self.tokens[slot])
        return is_known and self._prefixes.is_redundant(slot)

    def _clear(self) -> None:
        """Record that all slots are empty, after the memory was cleared."""
        for slot in range(len(self.tokens)):
            self.tokens[slot], self.cells[slot] = [], []
            self._prefixes.truncate(slot, 0)
            self.checkpoints.cut(slot, 0)
        self.used_cells = self.busy_cells = 0
        self.generation += 1

    def count_busy(self, slot: int) -> None:
        """Count the cells of a slot that has just become busy."""
        self.busy_cells += self._busy_part(slot)

    def uncount_busy(self, slot: int) -> None:
        """Stop counting the cells of a busy slot that is about to become idle."""
        self.busy_cells -= self._busy_part(slot)

    def _busy_part(self, slot: int) -> int:
        """Return the number of cells of a busy slot that no other busy slot uses; 0 for an idle
        slot.
        """
        if not self.is_busy[slot]:
            return 0
        others = (other for other, busy in enumerate(self.is_busy) if busy and other != slot)
        n_shared = max((self.count_shared(slot, other) for other in others), default=0)
        return len(self.cells[slot]) - n_shared

    def _cells_after_trim(self, slot: int, keep: int) -> int:
        """Return how many of a slot's cells stay in use when the slot is cut to `keep` tokens: the
        first `keep` cells, and later ones that another slot also uses.
        """
        cell = self.cells[slot][keep]
        others = [
            other
            for other, cells in enumerate(self.cells)
            if other != slot and cells[keep : keep + 1] == [cell]
        ]
        return max((self.count_shared(slot, other) for other in others), default=keep)

    def count_shared(self, first: int, second: int) -> int:
        """Return the number of cells that two slots share. These are always the cells of a common
        prefix.
        """
        return common_prefix.count_shared(self.cells[first], self.cells[second])

    def trim(self, slot: int, keep: int) -> int:
        """Cut a slot to its first `keep` tokens. Return the number of tokens left. If the memory
        cannot be cut there, this is the length of the last checkpoint before, or 0 without one.
        """
        tokens = self.tokens[slot]
        if keep < len(tokens):
            if not self.window_holds(slot, keep) or not self.memory.trim(slot, keep):
                keep = self._restore_checkpoint(slot, keep)
            self._cut_record(slot, keep)
        return len(tokens)

    def _restore_checkpoint(self, slot: int, length: int) -> int:
        """Set the memory of a slot back to the last checkpoint with at most `length` tokens. Return
        its length, or 0, with the memory of the slot empty, without a checkpoint.
        """
        checkpoint = self.checkpoints.nearest(slot, length)
        if checkpoint and self.memory.restore_checkpoint(slot, checkpoint.state, checkpoint.length):
            return checkpoint.length
        self.empty_memory(slot)
        return 0

    def _cut_record(self, slot: int, keep: int) -> None:
        """Record that the memory of a slot was cut to its first `keep` tokens."""
        tokens = self.tokens[slot]
        if keep >= len(tokens):
            return
        self.generation += 1
        n_busy = self._busy_part(slot)
        self.used_cells -= len(tokens) - self._cells_after_trim(slot, keep)
        del tokens[keep:]
        del self.cells[slot][keep:]
        self.busy_cells += self._busy_part(slot) - n_busy
        self._prefixes.truncate(slot, keep)
        self.checkpoints.cut(slot, keep)

    def take_checkpoint(self, slot: int) -> None:
        """Copy the part of a slot's state that cannot be cut, as it is at the slot's end."""
        state = self.memory.read_checkpoint(slot)
        self.checkpoints.add(slot, Checkpoint(len(self.tokens[slot]), state))

    def window_holds(self, slot: int, keep: int) -> bool:
        """Return whether a slot still has all cells that a token at position `keep` would attend
        to. A sliding window may have dropped some. Without a window the result is True.
        """
        first = self.memory.first_position(slot) if self.memory.n_swa and keep else 0
        return 0 <= first <= max(0, keep - self.memory.n_swa)
