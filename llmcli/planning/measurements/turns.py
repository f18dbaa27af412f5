"""Tasks whose times are measured in turns, so that a slow phase of the machine affects all."""

import statistics
import time
from collections.abc import Callable, Sequence

# If the median takes more than this many times the shortest, other programs were busy.
MAX_MEDIAN_RATIO = 1.3


def time_in_turns(tasks: Sequence[Callable[[int], object]], rounds: int) -> list[list[float]]:
    """Return for each task the seconds of `rounds` runs. A task gets the number of the round. A
    first run of each, number 0, is not timed.
    """
    seconds: list[list[float]] = [[] for _ in tasks]
    for number in range(rounds + 1):
        for samples, task in zip(seconds, tasks, strict=True):
            start_time = time.perf_counter()
            task(number)
            samples.append(time.perf_counter() - start_time)
    return [samples[1:] for samples in seconds]


def are_steady(seconds: Sequence[Sequence[float]]) -> bool:
    """Return whether other programs were quiet while the tasks ran."""
    return all(statistics.median(samples) < MAX_MEDIAN_RATIO * min(samples) for samples in seconds)
