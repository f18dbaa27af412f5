"""How fast this machine reads memory: all threads over more bytes than any cache holds.

Reading, not copying: a token reads every weight once and writes next to nothing. Each thread has a
piece of its own, which it filled itself (so that it lies near its core), and goes over it with
numpy's maximum of 32-bit integers, which is vectors of loads and compares and lets other threads
run. The fastest round counts: what disturbs only slows down.
"""

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

CHUNK = 1 << 20  # values of one call: 4 MiB, long beside the call itself
ROUNDS, SECONDS = 5, 0.1  # a round goes over its bytes until so much time has passed
BEYOND = 2  # going over so many caches' bytes in order leaves nothing of the last round in them

I32 = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Reading:
    """One size with one number of threads: bytes a second, round by round."""

    nbytes: int
    threads: int
    rates: tuple[float, ...]

    @property
    def best(self) -> float:
        """The fastest round."""
        return max(self.rates)


def sizes(cache: int | None, available: int | None) -> list[int]:
    """What to read: half the last cache, and two sizes beyond it, as far as a quarter of the memory
    allows.

    Where the cache is unknown, sizes that most machines' caches are smaller than.
    """
    large = max(256 << 20, BEYOND * (cache or 0))
    most = (available or 4 << 30) // 4
    return sorted({min(size, most) for size in ((cache or 32 << 20) // 2, large, 2 * large)})


def measure(nbytes: int, threads: int, rounds: int = ROUNDS, seconds: float = SECONDS) -> Reading:
    """Read `nbytes` with `threads` threads at once, `rounds` times."""
    gate = threading.Barrier(threads + 1)
    count = max(1, nbytes // 4 // threads)
    passes = [0]

    def work() -> None:
        piece = np.ones(count, np.int32)
        _read(piece)
        while True:
            gate.wait()
            if not passes[0]:
                return
            for _ in range(passes[0]):
                _read(piece)
            gate.wait()

    workers = [threading.Thread(target=work, daemon=True) for _ in range(threads)]
    for worker in workers:
        worker.start()

    def timed(times: int) -> float:
        passes[0] = times
        gate.wait()
        began = time.perf_counter()
        gate.wait()
        return time.perf_counter() - began

    times = max(1, round(seconds / timed(1)))
    rates = tuple(times * 4 * count * threads / timed(times) for _ in range(rounds))
    passes[0] = 0
    gate.wait()
    for worker in workers:
        worker.join()
    return Reading(4 * count * threads, threads, rates)


def roof(readings: Sequence[Reading], cache: int | None) -> Reading | None:
    """The fastest reading that no cache can have helped; None where the cache is unknown, or as
    large as all read.
    """
    beyond = [one for one in readings if cache is not None and one.nbytes >= BEYOND * cache]
    return max(beyond, key=lambda one: one.best, default=None)


def _read(piece: I32) -> None:
    for start in range(0, len(piece), CHUNK):
        piece[start : start + CHUNK].max()
