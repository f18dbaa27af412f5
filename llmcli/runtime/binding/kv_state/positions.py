"""Tracks the next position of each sequence. With it, a batch that does not continue its sequences
is refused before llama.cpp gets it.

llama.cpp requires that the rows of a sequence continue it without a gap, and otherwise returns −1
(src/llama-batch.cpp, llama_batch_allocr::init). It does not detect two mistakes: an empty sequence
that starts at a position above 0, and a position that appears twice in a batch.
"""

from collections.abc import Collection, Sequence

Span = tuple[int, int, int]  # sequence, its first position in a batch, the end of its positions
# llama.cpp copies the cells of a sequence one stretch of consecutive cells at a time. Starting a
# stretch costs as much as copying this many cells.
CELLS_PER_STRETCH = 24


def batch_spans(positions: Sequence[int], sequences: Sequence[int]) -> Collection[Span]:
    """Return the range of positions that a batch adds to each of its sequences, as (sequence,
    start, end). An assertion fails when the rows of a sequence leave a gap, repeat a position or go
    back.
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
    """Return the smallest and the largest number. A single number, the most frequent case, takes
    less time.
    """
    return (numbers[0], numbers[0]) if len(numbers) == 1 else (min(numbers), max(numbers))


class Positions:
    """The next position of every sequence, and an estimate of how much the cells of a sequence are
    mixed with those of other sequences in the pool.
    """

    def __init__(self, count: int) -> None:
        self._next = [0] * count
        # For each sequence, the number of passes in which other sequences also had rows. The cells
        # of a sequence are in at most about this many stretches.
        self._mixed = [0] * count

    def check(self, added: Collection[Span]) -> None:
        """Assert that a batch continues each of its sequences at the sequence's end."""
        for sequence, start, _ in added:
            assert start == self._next[sequence], (
                f"sequence {sequence} goes on at {self._next[sequence]}, not at {start}"
            )

    def advance(self, added: Collection[Span]) -> None:
        """Record that the rows of a batch are in the cache now."""
        mixed = len(added) > 1
        for sequence, _, stop in added:
            self._next[sequence] = stop
            self._mixed[sequence] += mixed

    def length(self, sequence: int) -> int:
        """Return the next position of a sequence, which is the number of its positions; 0 when it
        is empty.
        """
        return self._next[sequence]

    def is_scattered(self, sequence: int) -> bool:
        """Return whether the cells of a sequence may lie in so many separate stretches of the pool
        that it is faster to read the whole pool than these stretches.
        """
        return self._mixed[sequence] * CELLS_PER_STRETCH > sum(self._next)

    def set_length(self, sequence: int, length: int) -> None:
        """Set the length of a sequence after its cells were cut, copied or restored."""
        self._next[sequence] = length
        self._mixed[sequence] = min(length, self._mixed[sequence])

    def clear(self) -> None:
        """Record that all sequences are empty."""
        self._next, self._mixed = [0] * len(self._next), [0] * len(self._next)


def window_survives_shift(first: int, start: int, end: int, length: int, n_swa: int) -> bool:
    """Return whether the sliding window of a sequence is complete after a shift, in which the
    positions from `start` to `end` are dropped and the later ones move down.

    `first`: the lowest position that the layers with a sliding window still have. `length`: the
    number of positions of the sequence before the shift. `n_swa`: the size of the window in tokens;
    0 for none.
    """
    lowest = first if first < start else max(first, end) - (end - start)
    return not n_swa or lowest <= max(0, length - (end - start) - n_swa)
