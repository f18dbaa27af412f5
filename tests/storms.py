"""Many requests at once, at random: submitted, cancelled, dropped, with integrity looked at after
each step.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from llmcli.runtime.engine import Engine
from llmcli.runtime.request import Answer, Request

STEPS = 100_000


@dataclass
class Storm:
    """What came of one. `answers` by the number of the request; None where it was dropped."""

    answers: dict[int, Answer | None] = field(default_factory=dict)
    preempted: int = 0
    steps: int = 0


def storm(
    engine: Engine,
    requests: Sequence[Request],
    rng: random.Random,
    *,
    at_once: int = 4,
    cancelled: float = 0.0,
    dropped: float = 0.0,
    check: Callable[[], None] = lambda: None,
) -> Storm:
    """Submit up to `at_once` requests before each step, end some early, until all are over."""
    made, left = Storm(), list(enumerate(requests))
    numbers: dict[int, int] = {}
    while left or engine.busy:
        for _ in range(min(len(left), rng.randrange(at_once + 1))):
            number, request = left.pop(0)
            numbers[engine.submit(request)] = number
        for one, number in [*numbers.items()]:
            if rng.random() < cancelled:
                engine.cancel(one)
            elif rng.random() < dropped:
                engine.drop(one)
                del numbers[one]
                made.answers[number] = None
        for event in engine.step():
            if event.finish and event.sequence in numbers:
                made.answers[numbers.pop(event.sequence)] = engine.answer(event.sequence)
        engine.check()
        check()
        made.preempted = max(made.preempted, engine.load.preempted)
        made.steps += 1
        assert made.steps < STEPS, "it never ended"
    return made
