"""Clocks around functions of the running program, put in for a measurement and taken out again.

The code that is measured has no clocks of its own: each would cost every answer about a microsecond
a token.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

Place = tuple[str, Any, str]  # the part, who has the function (a class or a module), its name


@dataclass(slots=True)
class Probe:
    """Seconds spent in each part since `take` was last called. Parts must not lie within one
    another.
    """

    clock: Callable[[], float] = time.perf_counter
    spent: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    def wrap(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function with a clock around it."""
        clock, spent = self.clock, self.spent

        def timed(*args: Any) -> Any:
            begun = clock()
            try:
                return function(*args)
            finally:
                spent[part] += clock() - begun

        return timed

    def take(self) -> dict[str, float]:
        """What was spent, which begins anew."""
        taken = dict(self.spent)
        self.spent.clear()
        return taken

    @contextmanager
    def at(self, places: Sequence[Place]) -> Iterator[None]:
        """Clocks around all of these functions."""
        before = [(owner, name, getattr(owner, name)) for _, owner, name in places]
        for (part, owner, name), (_, _, function) in zip(places, before, strict=True):
            setattr(owner, name, self.wrap(part, function))
        try:
            yield
        finally:
            for owner, name, function in before:
                setattr(owner, name, function)
