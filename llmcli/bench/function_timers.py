"""Timers around functions of the running program, which are installed only for a measurement.

The measured code itself contains no timers, because they would slow down every token even when
nothing is measured.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

# the name of a phase, the class or module that contains the function, the function's name
TimedFunction = tuple[str, Any, str]


@dataclass(slots=True)
class FunctionTimers:
    """Adds up the seconds that the timed functions of each phase take. A timed function must not
    call another timed function, whose time would be counted twice.

    `seconds`: the seconds of each phase since the last reset.
    """

    clock: Callable[[], float] = time.perf_counter
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    def wrap(self, phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that calls `function` and adds the call's duration to the phase
        `phase`.
        """
        clock, seconds = self.clock, self.seconds

        def timed(*args: Any) -> Any:
            begun = clock()
            try:
                return function(*args)
            finally:
                seconds[phase] += clock() - begun

        return timed

    def reset(self) -> dict[str, float]:
        """Return the seconds of each phase, and clear them."""
        seconds = dict(self.seconds)
        self.seconds.clear()
        return seconds

    @contextmanager
    def install(self, functions: Sequence[TimedFunction]) -> Iterator[None]:
        """Replace each of these functions by its timed version, and restore the original functions
        at the end of the block.
        """
        originals = [(owner, name, getattr(owner, name)) for _, owner, name in functions]
        for (phase, owner, name), (_, _, function) in zip(functions, originals, strict=True):
            setattr(owner, name, self.wrap(phase, function))
        try:
            yield
        finally:
            for owner, name, function in originals:
                setattr(owner, name, function)
