"""Timers around functions of the running program, installed for a measurement and removed
afterwards.

The measured code itself has no timers: each would cost about a microsecond per token.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

# the phase, the class or module that has the function, the function's name
TimedFunction = tuple[str, Any, str]


@dataclass(slots=True)
class FunctionTimers:
    """The seconds spent in each phase since the last reset. The timed functions must not call one
    another.
    """

    clock: Callable[[], float] = time.perf_counter
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    def wrap(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function with a timer around it."""
        clock, spent = self.clock, self.seconds

        def timed(*args: Any) -> Any:
            begun = clock()
            try:
                return function(*args)
            finally:
                spent[part] += clock() - begun

        return timed

    def reset(self) -> dict[str, float]:
        """Return the seconds of each phase, and reset them."""
        taken = dict(self.seconds)
        self.seconds.clear()
        return taken

    @contextmanager
    def install(self, places: Sequence[TimedFunction]) -> Iterator[None]:
        """Install timers around all of these functions."""
        before = [(owner, name, getattr(owner, name)) for _, owner, name in places]
        for (part, owner, name), (_, _, function) in zip(places, before, strict=True):
            setattr(owner, name, self.wrap(part, function))
        try:
            yield
        finally:
            for owner, name, function in before:
                setattr(owner, name, function)
