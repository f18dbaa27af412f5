"""Reads that take their time are begun before they are wanted, several at once.

Whoever writes a source asks for rows in one order (source.Weight says which), so what comes next is
known. It knows rows and threads, not where the rows come from.
"""

import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from quant import native, pipeline
from quant.source import Source, Weight

if TYPE_CHECKING:
    from quant.native import U8

READS = 6  # at once
AHEAD = 1 << 27  # bytes that may be there before they are wanted, and one slab more


def ahead(source: Source) -> Source:
    """The same source for one writing of it; reads in another order are right too, only slower."""
    queue = _Queue(source.weights)
    weights = (
        replace(weight, read=partial(queue.read, at)) for at, weight in enumerate(source.weights)
    )
    return replace(source, weights=tuple(weights))


class _Read(threading.Thread):
    """One read under way; a daemon, so that nobody who gives up has to wait for a server."""

    def __init__(self, weight: Weight, first: int, last: int) -> None:
        super().__init__(name="ahead", daemon=True)
        self.weight, self.first, self.last = weight, first, last
        self.nbytes = (last - first) * native.row_bytes(weight.type, weight.columns)
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self.rows = self.weight.read(self.first, self.last)
        except BaseException as error:  # noqa: BLE001 (raised again by whoever wants the rows)
            self.error = error

    def result(self) -> "U8":
        self.join()
        if self.error:
            raise self.error
        return self.rows


class _Queue:
    """The reads under way, by (weight, first row, last row), and what will be wanted after them."""

    def __init__(self, weights: tuple[Weight, ...]) -> None:
        self.weights = weights
        self.begun: dict[tuple[int, int, int], _Read] = {}
        self.next: Iterator[tuple[int, int, int]] = iter(())

    def read(self, index: int, first: int, last: int) -> "U8":
        wanted = index, first, last
        if wanted not in self.begun:
            self.begun.clear()
            self.begun[wanted] = _Read(self.weights[index], first, last)
            self.next = self._after(index, last)
        self._begin()
        return self.begun.pop(wanted).result()

    def _begin(self) -> None:
        while len(self.begun) < READS and sum(read.nbytes for read in self.begun.values()) < AHEAD:
            if (key := next(self.next, None)) is None:
                return
            self.begun[key] = _Read(self.weights[key[0]], *key[1:])

    def _after(self, index: int, row: int) -> Iterator[tuple[int, int, int]]:
        """What pipeline.stream asks for after `row` of a weight: slabs of it, then of the weights
        behind it.
        """
        for at in range(index, len(self.weights)):
            weight = self.weights[at]
            step = max(1, pipeline.SLAB // weight.columns)
            for first in range(row if at == index else 0, weight.rows, step):
                yield at, first, min(first + step, weight.rows)
