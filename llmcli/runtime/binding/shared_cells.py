"""Records which positions two sequences hold in the same cells, so that no cell is moved while
another sequence uses it.

A cell has one position for all its sequences, so llama_memory_seq_add moves it for all of them
(src/llama-kv-cache.cpp, seq_add). The record follows from the copies and cuts alone; llama.cpp is
not asked.
"""

PositionRanges = list[tuple[int, int]]  # [start, end) pairs, sorted and disjoint


class SharedCells:
    """For each pair of sequences, the ranges of positions that both hold in the same cells."""

    def __init__(self) -> None:
        self._pairs: dict[int, dict[int, PositionRanges]] = {}

    def record_copy(self, source: int, target: int, start: int, end: int) -> None:
        """Record that `target` got the cells of `source` from `start` to `end`. Each sequence that
        shares some of these cells with `source` now shares them with `target`, too.
        """
        for other, ranges in tuple(self._pairs.get(source, {}).items()):
            if other != target:
                for begin, stop in ranges:
                    self._add(target, other, max(begin, start), min(stop, end))
        self._add(source, target, start, end)

    def record_cut(self, sequence: int, start: int) -> None:
        """Record that a sequence has dropped its cells from position `start` on."""
        for other, ranges in tuple(self._pairs.get(sequence, {}).items()):
            self._put(
                sequence,
                other,
                [(begin, min(stop, start)) for begin, stop in ranges if begin < start],
            )

    def shared_end(self, sequence: int) -> int:
        """Return the end of the last range that a sequence shares with any other; 0 if it shares
        none.
        """
        return max((ranges[-1][1] for ranges in self._pairs.get(sequence, {}).values()), default=0)

    def clear(self) -> None:
        """Record that every sequence is empty."""
        self._pairs.clear()

    def _add(self, first: int, second: int, start: int, end: int) -> None:
        if start < end:
            joined: PositionRanges = []
            for begin, stop in sorted([*self._pairs.get(first, {}).get(second, []), (start, end)]):
                if joined and begin <= joined[-1][1]:
                    joined[-1] = joined[-1][0], max(stop, joined[-1][1])
                else:
                    joined.append((begin, stop))
            self._put(first, second, joined)

    def _put(self, first: int, second: int, ranges: PositionRanges) -> None:
        for left, right in ((first, second), (second, first)):
            partners = self._pairs.setdefault(left, {})
            if ranges:
                partners[right] = ranges
            else:
                partners.pop(right, None)
                if not partners:
                    del self._pairs[left]
