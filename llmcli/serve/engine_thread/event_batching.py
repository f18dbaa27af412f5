"""Batches events, so that tokens which arrive sooner than a user can notice are delivered together.

Waking the event loop and sending an event takes processor time from a model that computes on all
cores. The first token and the end of an answer are delivered at once. So are all events before a
pass that may take long; the caller decides that.
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
    """An event, with the answer if it is the last event of a sample."""

    event: Event
    answer: Answer | None


class EventReader(Protocol):
    """Receives events on the event loop `loop`."""

    @property
    def loop(self) -> asyncio.AbstractEventLoop: ...

    def deliver(self, events: list[AnswerEvent]) -> None: ...


class EventBatcher:
    """Holds events back and delivers them in batches; used by one thread. `window_seconds`: longest
    time for which tokens may be held; 0 delivers them after each pass.
    """

    def __init__(self, window_seconds: float) -> None:
        self.window_seconds = window_seconds
        self._pending: dict[EventReader, list[AnswerEvent]] = {}
        # readers that have received the beginning of their answers but no end in the last delivery
        self._started: set[EventReader] = set()
        self._urgent = False
        self._last = 0.0  # time of the last delivery

    def add(self, reader: EventReader, event: Event, answer: Answer | None) -> None:
        """Add an event for a reader."""
        self._pending.setdefault(reader, []).append(AnswerEvent(event, answer))
        self._urgent |= answer is not None or reader not in self._started

    def is_due(self, pass_seconds: float) -> bool:
        """Return whether the held events must be delivered before the next pass. `pass_seconds`:
        duration of the last pass, which is taken as that of the next one.
        """
        return bool(self._pending) and (
            self._urgent or time.perf_counter() + pass_seconds > self._last + self.window_seconds
        )

    def flush(self) -> None:
        """Deliver all held events, with one call for each event loop."""
        if not self._pending:
            return
        loops: dict[asyncio.AbstractEventLoop, list[tuple[EventReader, list[AnswerEvent]]]] = {}
        for reader, events in self._pending.items():
            loops.setdefault(reader.loop, []).append((reader, events))
            has_ended = any(answer is not None for _, answer in events)
            (self._started.discard if has_ended else self._started.add)(reader)
        self._pending, self._urgent, self._last = {}, False, time.perf_counter()
        for loop, batch in loops.items():
            call_on_loop(loop, partial(_deliver_all, batch))

    def drop(self, reader: EventReader) -> None:
        """Discard the events of a reader that reads no more."""
        self._pending.pop(reader, None)
        self._started.discard(reader)


def _deliver_all(batch: list[tuple[EventReader, list[AnswerEvent]]]) -> None:
    for reader, events in batch:
        reader.deliver(events)


def call_on_loop(loop: asyncio.AbstractEventLoop, function: Callable[[], None]) -> None:
    """Run a function on an event loop, if the loop is still running."""
    with suppress(RuntimeError):  # the loop is closed, so its coroutines need no events
        loop.call_soon_threadsafe(function)
