"""Delivers events in batches: tokens that follow each other faster than a user can notice are
delivered together.

Waking the event loop and sending an event takes CPU time from the model, which computes on all
cores. The first token and the last event of an answer are delivered at once. Before a step that may
take long, the caller delivers all held events.
"""

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import NamedTuple, Protocol

from llmcli.runtime.requests.request import Answer
from llmcli.types import Event


class AnswerEvent(NamedTuple):
    """An event of an answer. `answer`: the finished answer if this is its last event, otherwise
    None.
    """

    event: Event
    answer: Answer | None


class EventReader(Protocol):
    """A receiver of events, which are delivered on its event loop `loop`."""

    @property
    def loop(self) -> asyncio.AbstractEventLoop: ...

    def deliver(self, events: list[AnswerEvent]) -> None: ...


class EventBatcher:
    """Holds events back and delivers them in batches. Used by one thread. `window_seconds`: the
    longest time for which tokens are held back; 0 delivers them after every step.
    """

    def __init__(self, window_seconds: float) -> None:
        self.window_seconds = window_seconds
        self._pending: dict[EventReader, list[AnswerEvent]] = {}
        # readers that already received a token of their running answers; an event for any other
        # reader is urgent
        self._started: set[EventReader] = set()
        self._urgent = False
        self._last = 0.0  # time of the last delivery

    def add(self, reader: EventReader, event: Event, answer: Answer | None) -> None:
        """Hold an event for a reader. `answer`: the finished answer if this is its last event."""
        self._pending.setdefault(reader, []).append(AnswerEvent(event, answer))
        self._urgent |= answer is not None or reader not in self._started

    def is_due(self, step_seconds: float) -> bool:
        """Return whether the held events must be delivered before the next step. `step_seconds`:
        the duration of the last step, as an estimate for the next one.
        """
        return bool(self._pending) and (
            self._urgent or time.perf_counter() + step_seconds > self._last + self.window_seconds
        )

    def flush(self) -> None:
        """Deliver all held events, with one call for each event loop."""
        if not self._pending:
            return
        loops: dict[asyncio.AbstractEventLoop, list[tuple[EventReader, list[AnswerEvent]]]] = {}
        for reader, events in self._pending.items():
            loops.setdefault(reader.loop, []).append((reader, events))
            if any(answer is not None for _, answer in events):
                self._started.discard(reader)
            elif any(event.token is not None for event, _ in events):
                self._started.add(reader)
        self._pending, self._urgent, self._last = {}, False, time.perf_counter()
        for loop, batch in loops.items():
            call_on_loop(loop, partial(_deliver_all, batch))

    def drop(self, reader: EventReader) -> None:
        """Discard the held events of a reader that has stopped reading."""
        self._pending.pop(reader, None)
        self._started.discard(reader)


def _deliver_all(batch: list[tuple[EventReader, list[AnswerEvent]]]) -> None:
    for reader, events in batch:
        reader.deliver(events)


def call_on_loop(loop: asyncio.AbstractEventLoop, function: Callable[[], None]) -> None:
    """Run a function on an event loop. If the loop is closed, do nothing."""
    with suppress(RuntimeError):  # the loop is closed
        loop.call_soon_threadsafe(function)
