"""How far each sequence has come, so that a batch which does not follow on is refused before llama.cpp sees it.

llama.cpp wants the rows of a sequence to continue it without a gap, and answers −1 where they do not
(src/llama-batch.cpp, llama_batch_allocr::init). It lets some mistakes pass, which is worse: a sequence that is empty
may begin anywhere, and a position may come twice within one batch.
"""

from collections.abc import Iterable, Sequence

Span = tuple[int, int, int]  # sequence, its first position in a batch, the one behind its last


def spans(positions: Sequence[int], sequences: Sequence[int]) -> Iterable[Span]:
    """What a batch adds to each sequence; AssertionError where its rows leave a gap, repeat or go back."""
    if len(positions) == 1:
        return ((sequences[0], positions[0], positions[0] + 1),)
    first: dict[int, int] = {}
    behind: dict[int, int] = {}
    for sequence, position in zip(sequences, positions, strict=True):
        assert behind.get(sequence, position) == position, f"sequence {sequence} does not go on at {position}"
        first.setdefault(sequence, position)
        behind[sequence] = position + 1
    return [(sequence, start, behind[sequence]) for sequence, start in first.items()]


def ends(numbers: Sequence[int]) -> tuple[int, int]:
    """The smallest and the largest; of one, as nearly every pass has it, without code that must be fetched first."""
    return (numbers[0], numbers[0]) if len(numbers) == 1 else (min(numbers), max(numbers))


class Positions:
    """The next position of every sequence."""

    def __init__(self, count: int) -> None:
        self._next = [0] * count

    def check(self, added: Iterable[Span]) -> None:
        """AssertionError where a sequence would not be continued where it ends."""
        for sequence, start, _ in added:
            assert start == self._next[sequence], (
                f"sequence {sequence} goes on at {self._next[sequence]}, not at {start}"
            )

    def advance(self, added: Iterable[Span]) -> None:
        """The rows are in the cache."""
        for sequence, _, behind in added:
            self._next[sequence] = behind

    def length(self, sequence: int) -> int:
        """Positions that a sequence has passed: 0 where it is empty."""
        return self._next[sequence]

    def put(self, sequence: int, length: int) -> None:
        """The sequence has been cut, copied onto or read back."""
        self._next[sequence] = length

    def clear(self) -> None:
        """Every sequence is empty."""
        self._next = [0] * len(self._next)


def window_moves(first: int, start: int, end: int, length: int, n_swa: int) -> bool:
    """Whether a sequence of `length`, whose window layers hold positions from `first` on, has its whole window when
    the positions from `start` to `end` are given up and those behind move down."""
    lowest = first if first < start else max(first, end) - (end - start)
    return not n_swa or lowest <= max(0, length - (end - start) - n_swa)
