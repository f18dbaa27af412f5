"""The next position of each sequence. With it, a batch that does not continue its sequences is
refused before llama.cpp gets it.

llama.cpp requires that the rows of a sequence continue it without a gap, and otherwise returns −1
(src/llama-batch.cpp, llama_batch_allocr::init). Two mistakes it does not detect: an empty sequence
that starts at a position above 0, and a position that appears twice in a batch.
"""

from collections.abc import Collection, Sequence

Span = tuple[int, int, int]  # sequence, its first position in a batch, the end of its positions
# Copying cells has a cost for each stretch of consecutive cells (a few bytes per channel), which is
# as high as copying this many cells.
CELLS_PER_STRETCH = 24


def batch_spans(positions: Sequence[int], sequences: Sequence[int]) -> Collection[Span]:
    """Return the range of positions that a batch adds to each sequence. Raises AssertionError when
    the rows of a sequence leave a gap, repeat a position or go back.
    """
    if len(positions) == 1:
        return ((sequences[0], positions[0], positions[0] + 1),)
    first: dict[int, int] = {}
    stop: dict[int, int] = {}
    for sequence, position in zip(sequences, positions, strict=True):
        assert stop.get(sequence, position) == position, (
            f"sequence {sequence} does not go on at {position}"
        )
        first.setdefault(sequence, position)
        stop[sequence] = position + 1
    return [(sequence, start, stop[sequence]) for sequence, start in first.items()]


def min_max(numbers: Sequence[int]) -> tuple[int, int]:
    """Return the smallest and the largest number, with a shortcut for a single number, which is the
    most frequent case.
    """
    return (numbers[0], numbers[0]) if len(numbers) == 1 else (min(numbers), max(numbers))


class Positions:
    """The next position of every sequence, and an estimate of how much its cells are mixed with
    those of other sequences.
    """

    def __init__(self, count: int) -> None:
        self._next = [0] * count
        self._mixed = [
            0
            # for each sequence, the passes in which other sequences also had rows: an upper bound of
            # its stretches of cells
        ] * count

    def check(self, added: Collection[Span]) -> None:
        """Assert that a batch continues every sequence at its end."""
        for sequence, start, _ in added:
            assert start == self._next[sequence], (
                f"sequence {sequence} goes on at {self._next[sequence]}, not at {start}"
            )

    def advance(self, added: Collection[Span]) -> None:
        """Record that the rows of a batch are in the cache."""
        mixed = len(added) > 1
        for sequence, _, stop in added:
            self._next[sequence] = stop
            self._mixed[sequence] += mixed

    def length(self, sequence: int) -> int:
        """Return the next position of a sequence; 0 when it is empty."""
        return self._next[sequence]

    def is_scattered(self, sequence: int) -> bool:
        """Return whether a sequence's cells are in so many stretches that reading the cells of all
        sequences is faster.
        """
        return self._mixed[sequence] * CELLS_PER_STRETCH > sum(self._next)

    def set_length(self, sequence: int, length: int) -> None:
        """Set the length of a sequence after it was cut, copied or restored."""
        self._next[sequence] = length
        self._mixed[sequence] = min(length, self._mixed[sequence])

    def clear(self) -> None:
        """Record that every sequence is empty."""
        self._next, self._mixed = [0] * len(self._next), [0] * len(self._next)


def window_survives_shift(first: int, start: int, end: int, length: int, n_swa: int) -> bool:
    """Return whether the sliding window of a sequence is still complete after the positions from
    `start` to `end` are dropped and the later ones move down.

    `first`: the oldest position in the layers with a sliding window. `length`: number of positions
    of the sequence before the move. `n_swa`: tokens of the window; 0 for none.
    """
    lowest = first if first < start else max(first, end) - (end - start)
    return not n_swa or lowest <= max(0, length - (end - start) - n_swa)
