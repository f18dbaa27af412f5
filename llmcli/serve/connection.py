"""uvicorn's HTTP connection, with an end to what a client may leave open: a head, the rest of a body that nobody reads,
an answer that it does not read itself; and an order for what comes before the answer to something else is over.

uvicorn waits for a first request forever, and for the rest of a head that has begun; httptools, which reads them where
it is installed (Ray brings it), takes heads of any size. Nobody needs a key for either. 2026-11-22: a connection that
sent headers without an end made the server a gigabyte larger in ten seconds, and as many silent ones as there are file
descriptors keep everybody else out. What is no HTTP behind a request that is being answered was a traceback with h11,
and with httptools a second answer in the middle of the first.
"""

import asyncio
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

PATIENCE = 60.0  # seconds until a request's head is there, from its first byte or the connection's beginning
LARGEST = 1 << 16  # bytes of a head, about, as in h11; what one read brings is read
REST = 1 << 26  # bytes of a body that came behind its answer: many clients read only when they have sent all
Base: Any = AutoHTTPProtocol


class Connection(Base):  # type: ignore[misc]  # which class that is, uvicorn finds out
    """One connection; it closes itself where no request comes of it, and where nobody reads an answer."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._head = self._rest = self._unread = 0
        self._late: asyncio.TimerHandle | None = None
        self._stuck: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Begin to wait."""
        super().connection_made(transport)
        self._wait()

    def data_received(self, data: bytes) -> None:
        """Read; what is no body of a request under way is part of a head, or of a body that was answered unread."""
        before = self.cycle
        resting = before is None or before.response_complete
        unread = before is not None and before.response_complete and before.more_body
        head = not unread and (resting or not before.more_body)
        super().data_received(data)
        if self.cycle is not before or self.transport.get_protocol() is not self:  # it is here, or talks WebSocket
            self._head = self._rest = 0
            self._calm()
        elif unread:
            self._rest += len(data)
            self._bounded(self._rest, REST)
        elif head and self.transport.is_reading():  # else it is kept for when the request under way is over
            self._head += len(data)
            self._bounded(self._head, LARGEST, wait=resting)

    def send_400_response(self, msg: str) -> None:
        """What came is no HTTP: told where it is the next to be answered, else the connection ends behind what is."""
        cycle = self.cycle
        over = cycle is None or cycle.response_complete
        if over and (cycle is None or not cycle.more_body):
            super().send_400_response(msg)
        elif over:  # the rest of a body that was answered unread
            self.transport.close()
        elif cycle.more_body and not (cycle.response_started or getattr(self, "pipeline", None)):
            super().send_400_response(msg)
        else:
            cycle.keep_alive = False
            self.flow.pause_reading()

    def pause_writing(self) -> None:
        """More lies here than the client reads."""
        super().pause_writing()
        self._unread = self.transport.get_write_buffer_size()
        self._stuck = self.loop.call_later(PATIENCE, self._look)

    def resume_writing(self) -> None:
        """It reads on."""
        if self._stuck is not None:
            self._stuck.cancel()
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait no more."""
        self._calm()
        if self._stuck is not None:
            self._stuck.cancel()
        super().connection_lost(exc)

    def _look(self) -> None:
        """Whether the client has read anything since; slow ones are let be."""
        left = self.transport.get_write_buffer_size()
        if left >= self._unread:
            self.transport.abort()
        else:
            self._unread = left
            self._stuck = self.loop.call_later(PATIENCE, self._look)

    def _bounded(self, count: int, most: int, wait: bool = True) -> None:
        if count > most:
            self.transport.close()
        elif wait:
            self._wait()

    def _wait(self) -> None:
        if self._late is None:
            self._late = self.loop.call_later(PATIENCE, self.transport.close)

    def _calm(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None
