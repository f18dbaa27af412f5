"""Records which cells of the KV cache belong to two sequences, so that no cell is moved to another
position while a second sequence uses it.

A cell has one position for all its sequences, so llama_memory_seq_add moves it for all of them
(src/llama-kv-cache.cpp, seq_add). The record is derived from the copies and cuts that are made;
llama.cpp offers no way to read it.
"""

PositionRanges = list[tuple[int, int]]  # [start, end) pairs, sorted and disjoint


class SharedCells:
    """For each pair of sequences, the ranges of positions whose cells belong to both sequences."""

    def __init__(self) -> None:
        self._pairs: dict[int, dict[int, PositionRanges]] = {}

    def record_copy(self, source: int, target: int, start: int, end: int) -> None:
        """Record that `target` now shares the cells of `source` from position `start` to `end`
        (exclusive). Sequences that already share some of these cells with `source` now also share
        them with `target`.
        """
        for partner, ranges in tuple(self._pairs.get(source, {}).items()):
            if partner != target:
                for begin, stop in ranges:
                    self._add(target, partner, max(begin, start), min(stop, end))
        self._add(source, target, start, end)

    def record_cut(self, sequence: int, start: int) -> None:
        """Record that a sequence has dropped its cells from position `start` on."""
        for partner, ranges in tuple(self._pairs.get(sequence, {}).items()):
            self._set(
                sequence,
                partner,
                [(begin, min(stop, start)) for begin, stop in ranges if begin < start],
            )

    def shared_end(self, sequence: int) -> int:
        """Return the end (exclusive) of the last position that a sequence shares with any other
        sequence; 0 if it shares none.
        """
        return max((ranges[-1][1] for ranges in self._pairs.get(sequence, {}).values()), default=0)

    def clear(self) -> None:
        """Record that all sequences are empty."""
        self._pairs.clear()

    def _add(self, first: int, second: int, start: int, end: int) -> None:
        """Add the range from `start` to `end` to those of two sequences, and join overlapping
        ranges.
        """
        if start < end:
            joined: PositionRanges = []
            for begin, stop in sorted([*self._pairs.get(first, {}).get(second, []), (start, end)]):
                if joined and begin <= joined[-1][1]:
                    joined[-1] = joined[-1][0], max(stop, joined[-1][1])
                else:
                    joined.append((begin, stop))
            self._set(first, second, joined)

    def _set(self, first: int, second: int, ranges: PositionRanges) -> None:
        """Replace the ranges that two sequences share."""
        for left, right in ((first, second), (second, first)):
            partners = self._pairs.setdefault(left, {})
            if ranges:
                partners[right] = ranges
            else:
                partners.pop(right, None)
                if not partners:
                    del self._pairs[left]
