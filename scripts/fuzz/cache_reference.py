"""A slow reference implementation of llama.cpp's KV cache, for fuzz/context.py.

It stores each cell as an object and follows the documentation of llama_memory_* in llama.h. It
shares no code with llmcli's ledger and binding, whose errors it must find.
"""

from dataclasses import dataclass, field

from llmcli.runtime.binding.rows.batch import BatchRows


@dataclass
class Cell:
    """A used cell of the cache. `owners`: the sequences that contain it. `pure`: no token before it
    was removed, so its keys and values equal those of a fresh pass.
    """

    position: int
    token: int
    owners: set[int]
    pure: bool = True


@dataclass
class Reference:
    """The expected content of a cache with `size` cells. `streams`: sequences share no cells, and
    each has `size` cells. `shifts` counts the calls of `shift`.
    """

    size: int
    streams: bool = False
    cells: list[Cell] = field(default_factory=list)
    shifts: int = 0

    def tokens_of(self, sequence: int) -> list[int]:
        """Return the tokens of a sequence in order of position. Raises AssertionError if a position
        is missing.
        """
        cells = sorted(
            (cell.position, cell.token) for cell in self.cells if sequence in cell.owners
        )
        assert [position for position, _ in cells] == list(range(len(cells))), (
            "the reference itself has a gap"
        )
        return [token for _, token in cells]

    def pure(self, sequence: int, end: int) -> bool:
        """Return whether the cells of the first `end` tokens are pure, so that their logits must
        equal those of a fresh pass.
        """
        return all(
            cell.pure for cell in self.cells if sequence in cell.owners and cell.position < end
        )

    def fits(self, rows: BatchRows) -> bool:
        """Return whether there are enough free cells for every row of a batch."""
        if not self.streams:
            return len(self.cells) + len(rows) <= self.size
        return all(
            len(self.tokens_of(sequence)) + rows.sequences.count(sequence) <= self.size
            for sequence in set(rows.sequences)
        )

    def append_rows(self, rows: BatchRows) -> None:
        """Add a cell for every row of a batch that the context has computed."""
        for token, position, sequence in zip(
            rows.tokens, rows.positions, rows.sequences, strict=True
        ):
            self.cells.append(Cell(position, token, {sequence}, self.pure(sequence, position)))

    def append_tokens(self, sequence: int, start: int, tokens: list[int]) -> None:
        """Add a cell for each of the tokens of a sequence from position `start` on."""
        for position, token in enumerate(tokens, start):
            self.cells.append(Cell(position, token, {sequence}, self.pure(sequence, position)))

    def trim(self, sequence: int, keep: int) -> None:
        """Remove a sequence's positions from `keep` on. Cells without an owner become free."""
        for cell in self.cells:
            if cell.position >= keep:
                cell.owners.discard(sequence)
        self.cells = [cell for cell in self.cells if cell.owners]

    def copy(self, source: int, target: int, start: int, end: int) -> None:
        """Add the positions from `start` to `end` of one sequence to another one. In a pool the
        sequences share the cells; with streams the cells are copied.
        """
        for cell in [
            cell for cell in self.cells if source in cell.owners and start <= cell.position < end
        ]:
            if self.streams:
                self.cells.append(Cell(cell.position, cell.token, {target}, cell.pure))
            else:
                cell.owners.add(target)

    def fill(self, sequence: int, tokens: list[int], pure: list[bool]) -> None:
        """Fill an empty sequence with tokens in its own cells, as restoring a state does. `pure` is
        the flag of each cell.
        """
        for at, (token, is_pure) in enumerate(zip(tokens, pure, strict=True)):
            self.cells.append(Cell(at, token, {sequence}, is_pure))

    def can_shift(self, sequence: int, end: int) -> bool:
        """Return whether a sequence shares none of its cells from `end` on with another one. Only
        then can these cells be moved.
        """
        return all(
            cell.owners == {sequence}
            for cell in self.cells
            if sequence in cell.owners and cell.position >= end
        )

    def shift(self, sequence: int, start: int, end: int) -> None:
        """Remove the positions from `start` to `end`, and move the following cells down. They still
        depend on the removed tokens, so they are no longer pure.
        """
        self.shifts += 1
        own_cells = [cell for cell in self.cells if sequence in cell.owners]
        for cell in own_cells:
            if start <= cell.position < end:
                cell.owners.discard(sequence)
            elif cell.position >= end:
                cell.position, cell.pure = cell.position - (end - start), False
        self.cells = [cell for cell in self.cells if cell.owners]
