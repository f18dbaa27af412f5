"""How far each sequence has come, so that a batch which does not follow on is refused before
llama.cpp sees it.

llama.cpp wants the rows of a sequence to continue it without a gap, and answers −1 where they do
not (src/llama-batch.cpp, llama_batch_allocr::init). It lets some mistakes pass, which is worse: a
sequence that is empty may begin anywhere, and a position may come twice within one batch.
"""

from collections.abc import Collection, Sequence

Span = tuple[int, int, int]  # sequence, its first position in a batch, the one behind its last
# Each stretch is a copy of a few bytes for each channel, as dear as so many cells that lie
# together. SmolLM2-135M: 96 stretches 39 ms, 544 cells in one 1.7 and in memory that is new to the
# process 10 (2026-11-22).
STRETCH = 24


def spans(positions: Sequence[int], sequences: Sequence[int]) -> Collection[Span]:
    """What a batch adds to each sequence; AssertionError where its rows leave a gap, repeat or go
    back.
    """
    if len(positions) == 1:
        return ((sequences[0], positions[0], positions[0] + 1),)
    first: dict[int, int] = {}
    behind: dict[int, int] = {}
    for sequence, position in zip(sequences, positions, strict=True):
        assert behind.get(sequence, position) == position, (
            f"sequence {sequence} does not go on at {position}"
        )
        first.setdefault(sequence, position)
        behind[sequence] = position + 1
    return [(sequence, start, behind[sequence]) for sequence, start in first.items()]


def ends(numbers: Sequence[int]) -> tuple[int, int]:
    """The smallest and the largest; of one, as nearly every pass has it, without code that must be
    fetched first.
    """
    return (numbers[0], numbers[0]) if len(numbers) == 1 else (min(numbers), max(numbers))


class Positions:
    """The next position of every sequence, and how mixed its cells may lie with those of others."""

    def __init__(self, count: int) -> None:
        self._next = [0] * count
        self._mixed = [
            0
        ] * count  # passes in which it took part beside others: at most so many stretches

    def check(self, added: Collection[Span]) -> None:
        """AssertionError where a sequence would not be continued where it ends."""
        for sequence, start, _ in added:
            assert start == self._next[sequence], (
                f"sequence {sequence} goes on at {self._next[sequence]}, not at {start}"
            )

    def advance(self, added: Collection[Span]) -> None:
        """The rows are in the cache."""
        mixed = len(added) > 1
        for sequence, _, behind in added:
            self._next[sequence] = behind
            self._mixed[sequence] += mixed

    def length(self, sequence: int) -> int:
        """Positions that a sequence has passed: 0 where it is empty."""
        return self._next[sequence]

    def scattered(self, sequence: int) -> bool:
        """Whether its cells lie in so many stretches that those of all sequences are sooner read
        than they.
        """
        return self._mixed[sequence] * STRETCH > sum(self._next)

    def put(self, sequence: int, length: int) -> None:
        """The sequence has been cut, copied onto or read back."""
        self._next[sequence] = length
        self._mixed[sequence] = min(length, self._mixed[sequence])

    def clear(self) -> None:
        """Every sequence is empty."""
        self._next, self._mixed = [0] * len(self._next), [0] * len(self._next)


def window_moves(first: int, start: int, end: int, length: int, n_swa: int) -> bool:
    """Whether a sequence of `length`, whose window layers hold positions from `first` on, has its
    whole window when the positions from `start` to `end` are given up and those behind move down.
    """
    lowest = first if first < start else max(first, end) - (end - start)
    return not n_swa or lowest <= max(0, length - (end - start) - n_swa)
