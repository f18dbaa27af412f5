"""Timers around functions of the running program. They are installed for a measurement and removed
afterwards.

The measured code contains no timers, because each would cost about a microsecond per token even
without a measurement.
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
    """The seconds that the timed functions of each phase took since the last reset. A timed
    function must not call another one.
    """

    clock: Callable[[], float] = time.perf_counter
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    def wrap(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function with a timer around it, which adds to the phase `part`."""
        clock, spent = self.clock, self.seconds

        def timed(*args: Any) -> Any:
            begun = clock()
            try:
                return function(*args)
            finally:
                spent[part] += clock() - begun

        return timed

    def reset(self) -> dict[str, float]:
        """Return the seconds of each phase, and set them to zero."""
        taken = dict(self.seconds)
        self.seconds.clear()
        return taken

    @contextmanager
    def install(self, places: Sequence[TimedFunction]) -> Iterator[None]:
        """Install timers around all of these functions, and remove them after the block."""
        before = [(owner, name, getattr(owner, name)) for _, owner, name in places]
        for (part, owner, name), (_, _, function) in zip(places, before, strict=True):
            setattr(owner, name, self.wrap(part, function))
        try:
            yield
        finally:
            for owner, name, function in before:
                setattr(owner, name, function)
