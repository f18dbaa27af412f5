"""A measurement of this machine's memory bandwidth: all threads together read more bytes than any
cache holds.

Reading is measured, not copying, because decoding reads every weight once and writes almost
nothing. Each thread fills its own part of the buffer first, so that this part is in memory near its
core. Then it computes the maximum of the part's 32-bit integers with numpy, which releases the
interpreter lock. The fastest round counts, because disturbances can only make a round slower.
"""

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

CHUNK_VALUES = (
    1 << 20
)  # values per numpy call (4 MiB); so many that the call itself hardly takes time
ROUNDS, ROUND_SECONDS = 5, 0.1  # number of rounds; seconds for which a round repeats its reading
# If a buffer is this many times as large as the cache, reading it in order leaves nothing in the
# cache for the next round.
MIN_CACHE_FACTOR = 2

I32 = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class BandwidthReading:
    """The measured bandwidth of reading a buffer of `nbytes` bytes with a number of threads.
    `round_rates`: bytes per second of each round.
    """

    nbytes: int
    threads: int
    round_rates: tuple[float, ...]

    @property
    def best_rate(self) -> float:
        """The rate of the fastest round, in bytes per second."""
        return max(self.round_rates)


def buffer_sizes(cache_bytes: int | None, available_bytes: int | None) -> list[int]:
    """Return the sizes of the buffers to read: half of the last-level cache, and two sizes above
    it. None exceeds a quarter of the available memory.

    If the cache size is unknown, the sizes are larger than the caches of most machines. All sizes
    are in bytes.
    """
    large = max(256 << 20, MIN_CACHE_FACTOR * (cache_bytes or 0))
    most = (available_bytes or 4 << 30) // 4
    return sorted({min(size, most) for size in ((cache_bytes or 32 << 20) // 2, large, 2 * large)})


def measure_bandwidth(
    nbytes: int, threads: int, rounds: int = ROUNDS, seconds: float = ROUND_SECONDS
) -> BandwidthReading:
    """Measure the bandwidth with which `threads` threads together read `nbytes` bytes."""
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
    """Return the fastest reading that certainly came from memory, not from a cache.

    Returns None if the cache size is unknown, or if no buffer was large enough.
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
