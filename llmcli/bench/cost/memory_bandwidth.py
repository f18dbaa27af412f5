"""A measurement of this machine's memory bandwidth: all threads together read a buffer that is
larger than any cache.

Only reading is measured, because decoding reads every weight once and writes almost nothing. Each
thread first fills its own segment of the buffer, so that the operating system places the segment in
memory near the thread's core. Then the thread computes the maximum of the segment's 32-bit integers
with numpy, which releases the interpreter lock. The fastest round is the result, because
disturbances can only make a round slower.
"""

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

CHUNK_VALUES = 1 << 20  # values per numpy call (4 MiB), so that the call's overhead is negligible
ROUNDS, ROUND_SECONDS = 5, 0.1  # number of rounds; seconds for which a round repeats its reading
# If a buffer is this many times as large as the cache, reading it in order leaves nothing in the
# cache for the next round.
MIN_CACHE_FACTOR = 2

I32 = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class BandwidthReading:
    """The measured bandwidth of reading a buffer of `nbytes` bytes with `threads` threads.
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
    """Return the sizes in bytes of the buffers to read: half of the last-level cache, and two sizes
    that exceed the cache. Each size is limited to a quarter of the available memory.

    If the cache size is unknown, the two large sizes exceed the caches of most machines.
    """
    large = max(256 << 20, MIN_CACHE_FACTOR * (cache_bytes or 0))
    max_bytes = (available_bytes or 4 << 30) // 4
    return sorted(
        {min(size, max_bytes) for size in ((cache_bytes or 32 << 20) // 2, large, 2 * large)}
    )


def measure_bandwidth(
    nbytes: int, threads: int, rounds: int = ROUNDS, seconds: float = ROUND_SECONDS
) -> BandwidthReading:
    """Measure the bandwidth at which `threads` threads together read `nbytes` bytes. A round
    repeats the reading for about `seconds`.
    """
    barrier = threading.Barrier(threads + 1)
    count = max(1, nbytes // 4 // threads)
    n_passes = [0]

    def read_segment() -> None:
        segment = np.ones(count, np.int32)
        _read(segment)
        while True:
            barrier.wait()
            if not n_passes[0]:
                return
            for _ in range(n_passes[0]):
                _read(segment)
            barrier.wait()

    workers = [threading.Thread(target=read_segment, daemon=True) for _ in range(threads)]
    for worker in workers:
        worker.start()

    def time_round(times: int) -> float:
        n_passes[0] = times
        barrier.wait()
        began = time.perf_counter()
        barrier.wait()
        return time.perf_counter() - began

    repeats = max(1, round(seconds / time_round(1)))
    rates = tuple(repeats * 4 * count * threads / time_round(repeats) for _ in range(rounds))
    n_passes[0] = 0
    barrier.wait()
    for worker in workers:
        worker.join()
    return BandwidthReading(4 * count * threads, threads, rates)


def memory_roof(
    readings: Sequence[BandwidthReading], cache_bytes: int | None
) -> BandwidthReading | None:
    """Return the fastest reading whose buffer was too large for the cache, so that its bytes came
    from memory.

    Returns None if the cache size is unknown, or if no buffer was large enough.
    """
    larger_than_cache = [
        reading
        for reading in readings
        if cache_bytes is not None and reading.nbytes >= MIN_CACHE_FACTOR * cache_bytes
    ]
    return max(larger_than_cache, key=lambda reading: reading.best_rate, default=None)


def _read(segment: I32) -> None:
    for start in range(0, len(segment), CHUNK_VALUES):
        segment[start : start + CHUNK_VALUES].max()
