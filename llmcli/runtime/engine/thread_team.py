"""How many threads compute the tokens of answers while other programs use the processor.

The threads of a pass wait for the slowest one after every operation. Beside a program that takes a
core, two threads on two cores are slower than one: the system lets the program and a thread take
turns on the same core. So when threads are preempted, fewer are tried, and when few are in use, more
are tried from time to time. The faster number is kept. Passes are compared with passes of as many
rows.
"""

import resource
import time
from collections.abc import Callable
from dataclasses import dataclass

# A measurement of a number of threads: at least so many seconds and passes.
WINDOW_SECONDS, WINDOW_PASSES = 0.05, 3
# Threads are preempted if the system takes the processor from them so many times a second.
MIN_PREEMPTIONS = 20.0
# Another number of threads is kept if a pass takes less than this share of the time.
MAX_KEPT_RATIO = 0.95
# seconds until the next trial: after one that was kept, and at most, after several that were not
FIRST_WAIT, MAX_WAIT = 0.5, 8.0


def count_preemptions() -> int:
    """Return how many times the system has taken the processor from a thread of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw


@dataclass(slots=True)
class _Window:
    """Measured passes of `rows` rows with one number of threads. `preemptions`: the count at its
    beginning.
    """

    rows: int
    preemptions: int
    passes: int = 0
    seconds: float = 0.0

    @property
    def is_complete(self) -> bool:
        return self.passes >= WINDOW_PASSES and self.seconds >= WINDOW_SECONDS


class ThreadTeam:
    """The number of threads of a context: at most `most`. The engine tells it the seconds of each
    pass, and it calls `set_threads` to change the number, while `may_change` returns True.
    """

    def __init__(
        self,
        most: int,
        set_threads: Callable[[int], None],
        may_change: Callable[[], bool] = lambda: True,
        clock: Callable[[], float] = time.monotonic,
        preemptions: Callable[[], int] = count_preemptions,
    ) -> None:
        self.most, self.count = most, most
        self._set_threads, self._may_change = set_threads, may_change
        self._clock, self._preemptions = clock, preemptions
        self._window = _Window(1, preemptions())
        self._pass_seconds = 0.0  # with the number that is kept, while another is tried
        self._kept: int | None = None  # this number; None while none is tried
        self._wait, self._next_trial = FIRST_WAIT, clock()

    def observe_pass(self, rows: int, seconds: float) -> None:
        """Take the time of a pass into account. Another number of rows than before begins a
        measurement anew, and ends a trial without a result.
        """
        if self.most == 1:
            return
        if rows != self._window.rows:
            self._window = _Window(rows, self._preemptions())
            if self._kept is not None:
                self._use(self._kept)
                self._kept = None
            return
        self._window.passes += 1
        self._window.seconds += seconds
        if self._window.is_complete:
            self._decide(self._window)
            self._window = _Window(rows, self._preemptions())

    def _decide(self, window: _Window) -> None:
        """Change the number of threads after a complete measurement, or keep it."""
        pass_seconds = window.seconds / window.passes
        if self._kept is not None:
            self._end_trial(pass_seconds, self._kept)
            return
        if self._clock() < self._next_trial or not self._may_change():
            return
        preempted = self._preemptions() - window.preemptions
        if self.count > 1 and preempted >= MIN_PREEMPTIONS * window.seconds:
            self._try(self.count - 1, pass_seconds)
        elif self.count < self.most:
            self._try(self.count + 1, pass_seconds)

    def _try(self, count: int, pass_seconds: float) -> None:
        self._kept, self._pass_seconds = self.count, pass_seconds
        self._use(count)

    def _end_trial(self, pass_seconds: float, kept: int) -> None:
        """Keep the number that was tried if it is faster, else go back, and wait longer."""
        self._kept = None
        if pass_seconds < MAX_KEPT_RATIO * self._pass_seconds:
            self._wait = FIRST_WAIT
        else:
            self._use(kept)
            self._wait = min(2 * self._wait, MAX_WAIT)
        self._next_trial = self._clock() + self._wait

    def _use(self, count: int) -> None:
        self.count = count
        self._set_threads(count)
