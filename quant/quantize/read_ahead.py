"""Read-ahead for slow sources: several reads are started before their rows are requested.

A run reads the rows of a source in a fixed order (see source.Weight), so that the next reads are
known.
"""

import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from quant.native import ggml
from quant.quantize import pipeline
from quant.source.source import Source, Weight

if TYPE_CHECKING:
    from quant.native.ggml import U8

MAX_READS = 6  # concurrent reads
READ_AHEAD_BYTES = 1 << 27  # limit of the bytes that are read ahead; a single slab may exceed it


def read_ahead(source: Source) -> Source:
    """Return the source with read-ahead, for one pass over it. Reads in an unexpected order give
    the same rows but are slower.
    """
    queue = _Queue(source.weights)
    weights = (
        replace(weight, read=partial(queue.read, at)) for at, weight in enumerate(source.weights)
    )
    return replace(source, weights=tuple(weights))


class _Read(threading.Thread):
    """One read in progress. It is a daemon thread, so that an interrupted process can end without
    waiting for a server.
    """

    def __init__(self, weight: Weight, first: int, last: int) -> None:
        super().__init__(name="ahead", daemon=True)
        self.weight, self.first, self.last = weight, first, last
        self.nbytes = (last - first) * ggml.row_bytes(weight.type, weight.columns)
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self.rows = self.weight.read(self.first, self.last)
        except BaseException as error:  # noqa: BLE001 (result() raises it again)
            self.error = error

    def result(self) -> "U8":
        """Wait for the read, and return its rows. Raises the error of the read."""
        self.join()
        if self.error:
            raise self.error
        return self.rows


class _Queue:
    """The reads in progress, by (index of the weight, first row, last row). `next` yields the reads
    that follow them.
    """

    def __init__(self, weights: tuple[Weight, ...]) -> None:
        self.weights = weights
        self.reads: dict[tuple[int, int, int], _Read] = {}
        self.next: Iterator[tuple[int, int, int]] = iter(())

    def read(self, index: int, first: int, last: int) -> "U8":
        """Return rows first .. last of a weight, from a read that is in progress or else from a new
        one.
        """
        key = index, first, last
        if key not in self.reads:
            self.reads.clear()
            self.reads[key] = _Read(self.weights[index], first, last)
            self.next = pipeline.row_slabs(self.weights, index, last)
        self._start_reads()
        return self.reads.pop(key).result()

    def _start_reads(self) -> None:
        """Start the next reads, up to the limits of reads and bytes."""
        while (
            len(self.reads) < MAX_READS
            and sum(read.nbytes for read in self.reads.values()) < READ_AHEAD_BYTES
        ):
            if (key := next(self.next, None)) is None:
                return
            self.reads[key] = _Read(self.weights[key[0]], *key[1:])
