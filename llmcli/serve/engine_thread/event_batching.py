"""Batches events before the event loop is woken: tokens that arrive sooner than anyone can notice
are delivered together.

Waking the loop and sending an event takes processor time from a model that computes on all cores.
The first token and the end of an answer never wait, nor do events before a pass that may be long
(the caller decides).
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
    """An event of one answer; the last event of a sample has its `answer`."""

    event: Event
    answer: Answer | None


class EventReader(Protocol):
    """Receives events on its own event loop."""

    @property
    def loop(self) -> asyncio.AbstractEventLoop: ...

    def deliver(self, events: list[AnswerEvent]) -> None: ...


class EventBatcher:
    """Belongs to one thread. `window_seconds`: seconds for which tokens may be held; 0 delivers
    each pass at once.
    """

    def __init__(self, window_seconds: float) -> None:
        self.window_seconds = window_seconds
        self._pending: dict[EventReader, list[AnswerEvent]] = {}
        # readers whose answers have begun and not ended since the last delivery
        self._started: set[EventReader] = set()
        self._urgent = False
        self._last = 0.0  # time of the last delivery

    def add(self, reader: EventReader, event: Event, answer: Answer | None) -> None:
        """Add an event for a reader."""
        self._pending.setdefault(reader, []).append(AnswerEvent(event, answer))
        self._urgent |= answer is not None or reader not in self._started

    def is_due(self, pass_seconds: float) -> bool:
        """Return whether the held events must not wait for another pass, which will take about as
        long as the last one: `pass_seconds`.
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
        """Drop the events of a reader that reads no more."""
        self._pending.pop(reader, None)
        self._started.discard(reader)


def _deliver_all(batch: list[tuple[EventReader, list[AnswerEvent]]]) -> None:
    for reader, events in batch:
        reader.deliver(events)


def call_on_loop(loop: asyncio.AbstractEventLoop, function: Callable[[], None]) -> None:
    """Run a function on an event loop, if the loop is still running."""
    with suppress(RuntimeError):  # the loop is closed, and its coroutines with it
        loop.call_soon_threadsafe(function)
