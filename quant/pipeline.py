"""Reads, encodes and hands on a plan's rows at once: a reader thread, an encoder on every core, the
caller writes.

Rows go through in the order of the plan; how much of them is alive at a time does not depend on the
model's size. It knows rows and types; what becomes of the bytes, and what a tensor is for, is
others' affair.
"""

import os
import threading
import time
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from quant import native
from quant.apart import squares
from quant.methods.base import Solver
from quant.source import Weight

if TYPE_CHECKING:
    from quant.native import U8

SLAB = 1 << 24  # values read at a time: 32 MiB of BF16
PIECE = (
    1 << 18
)  # values an encoder takes at a time: many, so that no core waits for the last of a slab
ALIVE = 1 << 28  # bytes read and not yet written; one slab is let through whatever its size
CHUNK = 1 << 16  # of these, values that are floats at a time: they stay within a core's own cache
SAMPLED = 32  # rows of a tensor that the error is measured on
LEAVE = 0.2  # seconds that a failed run waits for a read under way


class Task(Protocol):
    """What is to be made of a tensor: its rows in another type, by what solver() gives.

    That is given `chunk` values at a time, or as many as suit it here where that is 0.
    """

    @property
    def weight(self) -> Weight: ...
    @property
    def type(self) -> str: ...
    @property
    def chunk(self) -> int: ...
    def solver(self) -> Solver: ...


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows first … last of task number `index` (from 0), in their new type [rows, row_bytes].

    `signal` and `noise` are sums of squares of sampled rows and of what encoding changed in them,
    both 0 where rows are copied; `seconds` is the time of the one thread that made it; `closes`
    says that its slab ends here; `solver` made the codes, where there were any to make.
    """

    index: int
    first: int
    last: int
    data: "U8"
    signal: float
    noise: float
    seconds: float
    closes: bool
    solver: Solver | None = None


def stream(
    tasks: Sequence[Task], threads: int, begin: tuple[int, int] = (0, 0)
) -> Generator[Piece, None, None]:
    """All rows from `begin` (task, row) on, in order; leaving the iterator stops the threads behind
    it. `threads` 0 takes all cores.

    What goes wrong in a thread is raised here, after the pieces before it: the first mistake in the
    order of the plan is told, whatever the number of threads. Every encoder looks up after some
    65,000 values; a read under way is waited for a moment, then left to end by itself.
    """
    room = _Room(ALIVE)
    with ThreadPoolExecutor(threads or os.cpu_count() or 1, thread_name_prefix="encode") as pool:
        line = _Line(room)
        reader = threading.Thread(
            target=line.fill, args=(tasks, begin, pool), name="read", daemon=True
        )
        reader.start()
        try:
            for job, held in line:
                yield job.result()
                del job  # or the last piece would stay alive while the next is waited for
                room.give(held)
        finally:
            room.close()
            pool.shutdown(wait=False, cancel_futures=True)
            reader.join(LEAVE)


class _Room:
    """How many bytes may be alive; a slab larger than all of it is let in alone."""

    def __init__(self, limit: int) -> None:
        self.limit, self.used, self.closed = limit, 0, False
        self.changed = threading.Condition()

    def take(self, nbytes: int) -> bool:
        """Wait until there is room; False when nobody wants it any more."""
        with self.changed:
            self.changed.wait_for(
                lambda: self.closed or not self.used or self.used + nbytes <= self.limit
            )
            self.used += nbytes
            return not self.closed

    def give(self, nbytes: int) -> None:
        with self.changed:
            self.used -= nbytes
            self.changed.notify()

    def close(self) -> None:
        with self.changed:
            self.closed = True
            self.changed.notify_all()


class _Line:
    """Pieces in the making, in order, with the bytes that are free again when each has been
    written.
    """

    def __init__(self, room: _Room) -> None:
        self.room = room
        self.jobs: deque[tuple[Future[Piece], int] | None] = deque()
        self.came = threading.Semaphore(0)

    def __iter__(self) -> Iterator[tuple["Future[Piece]", int]]:
        while True:
            self.came.acquire()
            entry = self.jobs.popleft()
            if entry is None:
                return
            yield entry
            del entry

    def fill(self, tasks: Sequence[Task], begin: tuple[int, int], pool: ThreadPoolExecutor) -> None:
        """The reader's life: slab after slab, as soon as there is room for one."""
        try:
            making: _Making | None = None
            for index, first, last in _slabs(tasks, begin):
                if making is None or making.index != index:
                    making = _Making(index, tasks[index])
                if not self._slab(making, first, last, pool):
                    return
        except BaseException as error:  # noqa: BLE001 (raised again by whoever iterates)
            failed: Future[Piece] = Future()
            failed.set_exception(error)
            self._put((failed, 0))
        self._put(None)

    def _slab(self, making: "_Making", first: int, last: int, pool: ThreadPoolExecutor) -> bool:
        task, weight = making.task, making.task.weight
        new = 0 if task.type == weight.type else native.row_bytes(task.type, weight.columns)
        held = (last - first) * (native.row_bytes(weight.type, weight.columns) + new)
        if not self.room.take(held):
            return False
        stored = weight.read(first, last)
        step = max(1, max(PIECE, task.chunk) // weight.columns)
        for at in range(first, last, step):
            end = min(at + step, last)
            part = stored[at - first : end - first]
            if self.room.closed:
                return False
            job = pool.submit(_encode, making, at, part, end == last, self.room)
            self._put((job, held if end == last else 0))
        return True

    def _put(self, entry: tuple["Future[Piece]", int] | None) -> None:
        self.jobs.append(entry)
        self.came.release()


class _Making:
    """A tensor under way: the encoders share what solves it, which the first of them prepares."""

    def __init__(self, index: int, task: Task) -> None:
        self.index, self.task = index, task
        self.preparing = threading.Lock()
        self.prepared: Solver | None = None

    def solver(self) -> Solver:
        with self.preparing:
            if self.prepared is None:
                self.prepared = self.task.solver()
            return self.prepared


def _slabs(tasks: Sequence[Task], begin: tuple[int, int]) -> Iterator[tuple[int, int, int]]:
    """(task, first row, last row) of everything from `begin` on."""
    start, row = begin
    for index in range(start, len(tasks)):
        weight = tasks[index].weight
        step = max(1, SLAB // weight.columns)
        for first in range(row if index == start else 0, weight.rows, step):
            yield index, first, min(first + step, weight.rows)


def _encode(making: _Making, first: int, stored: "U8", closes: bool, room: _Room) -> Piece:
    """A piece in its new type, a few rows at a time: as floats they stay within a core's own cache."""
    import numpy as np

    began, task, weight = time.perf_counter(), making.task, making.task.weight
    index, last = making.index, first + len(stored)
    if task.type == weight.type:
        stored = np.ascontiguousarray(stored)
        native.check(stored, weight.type, label=weight.name)
        return Piece(index, first, last, stored, 0.0, 0.0, time.perf_counter() - began, closes)
    codes = np.empty((len(stored), native.row_bytes(task.type, weight.columns)), np.uint8)
    step, every = max(1, (task.chunk or CHUNK) // weight.columns), max(1, weight.rows // SAMPLED)
    signal, noise, solve = 0.0, 0.0, making.solver()
    for at in range(0, len(stored), step):
        if room.closed:
            raise CancelledError
        floats = native.decode(
            stored[at : at + step], weight.type, weight.columns, label=weight.name
        )
        made = solve(floats, first + at)
        codes[at : at + step] = made
        sample = slice(-(first + at) % every, None, every)
        if len(chosen := floats[sample]):
            again = native.decode(made[sample], task.type, weight.columns, label=weight.name)
            signal, noise = signal + squares(chosen), noise + squares(chosen - again)
    return Piece(
        index, first, last, codes, signal, noise, time.perf_counter() - began, closes, solve
    )
