"""Which positions two sequences hold in the same cells, so that none is moved under another's feet.

A position belongs to the cell: llama_memory_seq_add moves it for every sequence that holds the cell
(src/llama-kv-cache.cpp, seq_add). Known from the copies and cuts alone.
"""

Ranges = list[tuple[int, int]]  # from, up to; in order, apart from each other


class Sharing:
    """Pairs of sequences and the ranges of positions that they share."""

    def __init__(self) -> None:
        self._pairs: dict[int, dict[int, Ranges]] = {}

    def copied(self, source: int, target: int, start: int, end: int) -> None:
        """`target` has been given the cells of `source`, and shares them with whoever shares them
        with it.
        """
        for other, ranges in tuple(self._pairs.get(source, {}).items()):
            if other != target:
                for begin, behind in ranges:
                    self._add(target, other, max(begin, start), min(behind, end))
        self._add(source, target, start, end)

    def cut(self, sequence: int, start: int) -> None:
        """A sequence has given up what it shared from position `start` on."""
        for other, ranges in tuple(self._pairs.get(sequence, {}).items()):
            self._put(
                sequence,
                other,
                [(begin, min(behind, start)) for begin, behind in ranges if begin < start],
            )

    def end(self, sequence: int) -> int:
        """The position behind the last one that a sequence shares; 0 where it shares none."""
        return max((ranges[-1][1] for ranges in self._pairs.get(sequence, {}).values()), default=0)

    def clear(self) -> None:
        """Every sequence is empty."""
        self._pairs.clear()

    def _add(self, one: int, other: int, start: int, end: int) -> None:
        if start < end:
            joined: Ranges = []
            for begin, behind in sorted([*self._pairs.get(one, {}).get(other, []), (start, end)]):
                if joined and begin <= joined[-1][1]:
                    joined[-1] = joined[-1][0], max(behind, joined[-1][1])
                else:
                    joined.append((begin, behind))
            self._put(one, other, joined)

    def _put(self, one: int, other: int, ranges: Ranges) -> None:
        for mine, theirs in ((one, other), (other, one)):
            partners = self._pairs.setdefault(mine, {})
            if ranges:
                partners[theirs] = ranges
            else:
                partners.pop(theirs, None)
                if not partners:
                    del self._pairs[mine]
