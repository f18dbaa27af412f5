"""A slow model of the KV cache for fuzz/context.py, kept cell by cell.

It is written from the documentation of llama_memory_* in llama.h, without the ledger and the
binding.
"""

from dataclasses import dataclass, field

from llmcli.runtime.binding.batch import BatchRows


@dataclass
class Cell:
    """A cell of the cache. `pure`: no removed token precedes it."""

    position: int
    token: int
    owners: set[int]
    pure: bool = True


@dataclass
class Reference:
    """The expected content of the cache. `streams`: sequences share no cells, and each has `size`
    cells.
    """

    size: int
    streams: bool = False
    cells: list[Cell] = field(default_factory=list)
    shifts: int = 0

    def held(self, sequence: int) -> list[int]:
        """Return the tokens of a sequence in order of position."""
        mine = sorted((cell.position, cell.token) for cell in self.cells if sequence in cell.owners)
        assert [position for position, _ in mine] == list(range(len(mine))), (
            "the reference itself has a gap"
        )
        return [token for _, token in mine]

    def pure(self, sequence: int, end: int) -> bool:
        """Return whether the first `end` tokens equal those of one pass over them alone."""
        return all(
            cell.pure for cell in self.cells if sequence in cell.owners and cell.position < end
        )

    def fits(self, rows: BatchRows) -> bool:
        """Return whether there are cells for every row."""
        if not self.streams:
            return len(self.cells) + len(rows) <= self.size
        return all(
            len(self.held(one)) + rows.sequences.count(one) <= self.size
            for one in set(rows.sequences)
        )

    def put(self, rows: BatchRows) -> None:
        """Record a computed pass."""
        for token, position, sequence in zip(
            rows.tokens, rows.positions, rows.sequences, strict=True
        ):
            self.cells.append(Cell(position, token, {sequence}, self.pure(sequence, position)))

    def trim(self, sequence: int, keep: int) -> None:
        """Remove positions from `keep` on; cells without an owner become free."""
        for cell in self.cells:
            if cell.position >= keep:
                cell.owners.discard(sequence)
        self.cells = [cell for cell in self.cells if cell.owners]

    def copy(self, source: int, target: int, start: int, end: int) -> None:
        """Share cells within a pool, or copy them between streams."""
        for cell in [
            cell for cell in self.cells if source in cell.owners and start <= cell.position < end
        ]:
            if self.streams:
                self.cells.append(Cell(cell.position, cell.token, {target}, cell.pure))
            else:
                cell.owners.add(target)

    def fill(self, sequence: int, tokens: list[int], pure: list[bool]) -> None:
        """Fill an empty sequence with tokens in its own cells."""
        for at, (token, mark) in enumerate(zip(tokens, pure, strict=True)):
            self.cells.append(Cell(at, token, {sequence}, mark))

    def movable(self, sequence: int, end: int) -> bool:
        """Return whether no other sequence shares the cells from `end` on."""
        return all(
            cell.owners == {sequence}
            for cell in self.cells
            if sequence in cell.owners and cell.position >= end
        )

    def shift(self, sequence: int, start: int, end: int) -> None:
        """Remove a range and move the following cells down; they keep what they computed from it."""
        self.shifts += 1
        mine = [cell for cell in self.cells if sequence in cell.owners]
        for cell in mine:
            if start <= cell.position < end:
                cell.owners.discard(sequence)
            elif cell.position >= end:
                cell.position, cell.pure = cell.position - (end - start), False
        self.cells = [cell for cell in self.cells if cell.owners]
