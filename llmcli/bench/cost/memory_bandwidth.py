"""Memory read bandwidth of this machine: all threads read more bytes than any cache holds.

Decoding reads every weight once and writes almost nothing, so reading is measured, not copying.
Each thread fills its own piece, so that the piece is in memory near its core, and takes the maximum
of its 32-bit integers with numpy, which releases the interpreter lock. The fastest round counts,
because disturbances only slow a round down.
"""

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

CHUNK_VALUES = (
    1 << 20
)  # values per numpy call (4 MiB), so that the cost of the call does not matter
ROUNDS, ROUND_SECONDS = 5, 0.1  # a round repeats its read for this many seconds
# reading this many times the cache's size in order evicts everything the last round read
MIN_CACHE_FACTOR = 2

I32 = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class BandwidthReading:
    """The read bandwidth of one buffer size with one number of threads: bytes per second of each
    round.
    """

    nbytes: int
    threads: int
    round_rates: tuple[float, ...]

    @property
    def best_rate(self) -> float:
        """The rate of the fastest round, in bytes per second."""
        return max(self.round_rates)


def buffer_sizes(cache_bytes: int | None, available_bytes: int | None) -> list[int]:
    """Return the buffer sizes to read: half of the last-level cache, and two sizes beyond it, at
    most a quarter of the available memory.

    If the cache size is unknown, the sizes exceed the caches of most machines. All sizes in bytes.
    """
    large = max(256 << 20, MIN_CACHE_FACTOR * (cache_bytes or 0))
    most = (available_bytes or 4 << 30) // 4
    return sorted({min(size, most) for size in ((cache_bytes or 32 << 20) // 2, large, 2 * large)})


def measure_bandwidth(
    nbytes: int, threads: int, rounds: int = ROUNDS, seconds: float = ROUND_SECONDS
) -> BandwidthReading:
    """Measure the bandwidth of reading `nbytes` bytes with `threads` threads at once, `rounds`
    times.
    """
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

    repeats = max(1, round(seconds / timed(1)))
    rates = tuple(repeats * 4 * count * threads / timed(repeats) for _ in range(rounds))
    passes[0] = 0
    gate.wait()
    for worker in workers:
        worker.join()
    return BandwidthReading(4 * count * threads, threads, rates)


def memory_roof(
    readings: Sequence[BandwidthReading], cache_bytes: int | None
) -> BandwidthReading | None:
    """Return the fastest reading that no cache can have served.

    Returns None if the cache size is unknown or no reading exceeds it enough.
    """
    beyond = [
        reading
        for reading in readings
        if cache_bytes is not None and reading.nbytes >= MIN_CACHE_FACTOR * cache_bytes
    ]
    return max(beyond, key=lambda reading: reading.best_rate, default=None)


def _read(piece: I32) -> None:
    for start in range(0, len(piece), CHUNK_VALUES):
        piece[start : start + CHUNK_VALUES].max()
