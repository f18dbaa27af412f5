"""Which cells hold which tokens: counting, sharing and cutting.

A slot is a llama.cpp sequence id. Cells are numbered in the order in which they are filled; two
slots that share cells share a prefix.
"""

from collections.abc import Sequence

from llmcli.runtime.kv_cache.common_prefix import count_shared
from llmcli.runtime.kv_cache.context_protocols import CacheMemory
from llmcli.runtime.kv_cache.radix_tree import RadixTree


class Cells:
    """The tokens of every slot and the cell of each token."""

    def __init__(self, memory: CacheMemory) -> None:
        count = memory.n_seq_max
        self.memory = memory
        self.tokens: list[list[int]] = [[] for _ in range(count)]
        self._cells: list[list[int]] = [[] for _ in range(count)]
        self._prefixes = RadixTree(count)
        self._next_cell = 0
        self._used = 0

    @property
    def size(self) -> int:
        """Return the number of cells in the pool."""
        return self.memory.n_ctx

    @property
    def used_cells(self) -> int:
        """Return the number of cells that hold a token; a shared cell counts once."""
        return self._used

    @property
    def can_fork(self) -> bool:
        """Return whether slots may share cells and diverge at any token. Shared cells of a sliding
        window never expire, and recurrent state can only be copied at its end.
        """
        return not self.memory.is_recurrent and (
            not self.memory.n_swa or self.size <= self.memory.n_swa
        )

    def count_cells(self, slots: Sequence[int]) -> int:
        """Return the number of cells that these slots hold; a shared cell counts once."""
        return sum(
            len(self._cells[slot])
            - max((self._shared(slot, other) for other in slots[:at]), default=0)
            for at, slot in enumerate(slots)
        )

    def append(self, slot: int, tokens: list[int]) -> None:
        """Record tokens that a forward pass has added to the cache."""
        # Nearly every pass appends one token per sequence, and the list slices below cost more.
        if len(tokens) == 1:
            self.tokens[slot].append(tokens[0])
            self._cells[slot].append(self._next_cell)
        else:
            self.tokens[slot] += tokens
            self._cells[slot] += range(self._next_cell, self._next_cell + len(tokens))
        self._next_cell += len(tokens)
        self._used += len(tokens)

    def fork(self, source: int, target: int) -> None:
        """Make `target` hold the tokens of `source`. Cells that both hold already are kept."""
        same = self._shared(source, target)
        self._cut(target, same)
        assert len(self.tokens[target]) == same, "a memory that cannot be forked"
        self._share(source, target, same, len(self.tokens[source]))

    def trim(self, slot: int, keep: int) -> int:
        """Cut a slot to `keep` tokens. Return the number left, 0 when the memory cannot be cut
        there.
        """
        return self._cut(slot, keep)

    def restore(self, slot: int) -> None:
        """Drop cells beyond the recorded tokens, after an interrupted pass."""
        keep = len(self.tokens[slot])
        if not self.memory.trim(slot, keep) or not self._window_holds(slot, keep):
            self._cut(slot, 0)

    def check(self) -> None:
        """Assert that this map agrees with llama.cpp's own positions."""
        for slot, tokens in enumerate(self.tokens):
            assert len(tokens) == len(self._cells[slot])
            assert self.memory.last_position(slot) == len(tokens) - 1, (
                slot,
                self.memory.last_position(slot),
                len(tokens),
            )
        assert self.used_cells == len({cell for cells in self._cells for cell in cells}), (
            self.used_cells
        )
        assert self.used_cells <= self.size, (self.used_cells, self.size)

    def _share(self, source: int, target: int, start: int, end: int) -> None:
        """Give `target`, which ends at `start`, the cells of `source` from `start` to `end`."""
        if start < end:
            self.memory.copy(source, target, start, end)
            self.tokens[target] += self.tokens[source][start:end]
            self._cells[target] += self._cells[source][start:end]

    def _held_elsewhere(self, slot: int, keep: int) -> int:
        """Return how many of a slot's first cells (at least `keep`) other slots would still hold if
        it dropped the rest.
        """
        cell = self._cells[slot][keep]
        others = [
            at
            for at, cells in enumerate(self._cells)
            if at != slot and cells[keep : keep + 1] == [cell]
        ]
        return max((self._shared(slot, other) for other in others), default=keep)

    def _shared(self, first: int, second: int) -> int:
        """Return the number of cells that two slots share. Shared cells are always a prefix."""
        return count_shared(self._cells[first], self._cells[second])

    def _cut(self, slot: int, keep: int) -> int:
        tokens = self.tokens[slot]
        if keep < len(tokens) and not self._window_holds(slot, keep):
            keep = 0
        if keep < len(tokens) and not self.memory.trim(slot, keep):
            keep = 0
            emptied = self.memory.trim(slot, 0)
            assert emptied, "a memory that cannot even be emptied"
        if keep < len(tokens):
            self._used -= len(tokens) - self._held_elsewhere(slot, keep)
            del tokens[keep:]
            del self._cells[slot][keep:]
            self._prefixes.truncate(slot, keep)
        return len(tokens)

    def _window_holds(self, slot: int, keep: int) -> bool:
        """Return whether the token at position `keep` would still see its whole window."""
        first = self.memory.first_position(slot) if self.memory.n_swa and keep else 0
        return 0 <= first <= max(0, keep - self.memory.n_swa)
