"""What a KV cache must hold, kept cell by cell and slowly: the reference of fuzz_context.py.

It follows llama.cpp's words alone (llama.h, llama_memory_*), and knows neither the ledger nor the
binding.
"""

from dataclasses import dataclass, field

from llmcli.runtime.binding.batch import BatchRows


@dataclass
class Cell:
    """A place of the cache. `pure`: nothing that has left since stood before it."""

    position: int
    token: int
    owners: set[int]
    pure: bool = True


@dataclass
class Reference:
    """What the cache must hold, kept cell by cell; `streams`: nothing is shared, each sequence has
    `size` cells.
    """

    size: int
    streams: bool = False
    cells: list[Cell] = field(default_factory=list)
    shifts: int = 0

    def held(self, sequence: int) -> list[int]:
        """The tokens of a sequence, in order of position."""
        mine = sorted((cell.position, cell.token) for cell in self.cells if sequence in cell.owners)
        assert [position for position, _ in mine] == list(range(len(mine))), (
            "the reference itself has a gap"
        )
        return [token for _, token in mine]

    def pure(self, sequence: int, end: int) -> bool:
        """Whether the first `end` tokens of a sequence are as a pass over them alone makes them."""
        return all(
            cell.pure for cell in self.cells if sequence in cell.owners and cell.position < end
        )

    def fits(self, rows: BatchRows) -> bool:
        """Whether there are cells for every row."""
        if not self.streams:
            return len(self.cells) + len(rows) <= self.size
        return all(
            len(self.held(one)) + rows.sequences.count(one) <= self.size
            for one in set(rows.sequences)
        )

    def put(self, rows: BatchRows) -> None:
        """A pass has been computed."""
        for token, position, sequence in zip(
            rows.tokens, rows.positions, rows.sequences, strict=True
        ):
            self.cells.append(Cell(position, token, {sequence}, self.pure(sequence, position)))

    def trim(self, sequence: int, keep: int) -> None:
        """Positions from `keep` on are given up; a cell that nobody owns is free."""
        for cell in self.cells:
            if cell.position >= keep:
                cell.owners.discard(sequence)
        self.cells = [cell for cell in self.cells if cell.owners]

    def copy(self, source: int, target: int, start: int, end: int) -> None:
        """Cells are shared in a pool, and doubled between streams."""
        for cell in [
            cell for cell in self.cells if source in cell.owners and start <= cell.position < end
        ]:
            if self.streams:
                self.cells.append(Cell(cell.position, cell.token, {target}, cell.pure))
            else:
                cell.owners.add(target)

    def fill(self, sequence: int, tokens: list[int], pure: list[bool]) -> None:
        """An empty sequence has been given tokens in cells of its own."""
        for at, (token, mark) in enumerate(zip(tokens, pure, strict=True)):
            self.cells.append(Cell(at, token, {sequence}, mark))

    def movable(self, sequence: int, end: int) -> bool:
        """Whether nobody else holds what a sequence has from `end` on."""
        return all(
            cell.owners == {sequence}
            for cell in self.cells
            if sequence in cell.owners and cell.position >= end
        )

    def shift(self, sequence: int, start: int, end: int) -> None:
        """A piece is given up and what follows moves down; it keeps what it knew of the piece."""
        self.shifts += 1
        mine = [cell for cell in self.cells if sequence in cell.owners]
        for cell in mine:
            if start <= cell.position < end:
                cell.owners.discard(sequence)
            elif cell.position >= end:
                cell.position, cell.pure = cell.position - (end - start), False
        self.cells = [cell for cell in self.cells if cell.owners]
