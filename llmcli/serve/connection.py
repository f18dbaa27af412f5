"""uvicorn's HTTP connection with limits: on an unfinished head, on a body that nobody reads, on an
answer that the client does not read, and on what a client sends while its previous request is still
being answered.

uvicorn waits for ever for a first request, and for the rest of a head. httptools, which parses
heads where it is installed (Ray brings it), takes heads of any size. Neither needs a key.
2026-11-22: one connection that sent headers without end made the server a gigabyte larger in ten
seconds, and silent connections can take all file descriptors. Bytes that are no HTTP, sent behind a
request that is being answered, were a traceback with h11, and with httptools a second answer in the
middle of the first.
"""

import asyncio
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

PATIENCE = (
    60.0  # seconds for a request's head, from its first byte or from the connection's beginning
)
LARGEST = 1 << 16  # bytes of a head, as in h11; a little more may come in one read
REST = (
    1 << 26
)  # bytes of a body that still come after its answer: many clients read only once they have sent all
Base: Any = AutoHTTPProtocol


class Connection(Base):  # type: ignore[misc]  # which class that is, uvicorn finds out
    """One connection. It closes itself when no request comes, or when its client reads no answer."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._head = self._rest = self._unread = 0
        self._late: asyncio.TimerHandle | None = None
        self._stuck: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Start the clock for the first head."""
        super().connection_made(transport)
        self._wait()

    def data_received(self, data: bytes) -> None:
        """Parse, then count: bytes belong to a request's body, to a head, or to a body that was
        answered unread.
        """
        before = self.cycle
        resting = before is None or before.response_complete
        unread = before is not None and before.response_complete and before.more_body
        head = not unread and (resting or not before.more_body)
        super().data_received(data)
        if (
            self.cycle is not before or self.transport.get_protocol() is not self
        ):  # a request, or a WebSocket now
            self._head = self._rest = 0
            self._calm()
        elif unread:
            self._rest += len(data)
            self._bounded(self._rest, REST)
        elif (
            head and self.transport.is_reading()
        ):  # else uvicorn keeps it until the request under way is over
            self._head += len(data)
            self._bounded(self._head, LARGEST, wait=resting)

    def send_400_response(self, msg: str) -> None:
        """Answer bytes that are no HTTP, if it is their turn; else close behind the answer that is
        under way.
        """
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
        """The client reads more slowly than we write: start watching it."""
        super().pause_writing()
        self._unread = self.transport.get_write_buffer_size()
        self._stuck = self.loop.call_later(PATIENCE, self._look)

    def resume_writing(self) -> None:
        """The client has caught up."""
        if self._stuck is not None:
            self._stuck.cancel()
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop all clocks."""
        self._calm()
        if self._stuck is not None:
            self._stuck.cancel()
        super().connection_lost(exc)

    def _look(self) -> None:
        """Abort if the client has read nothing since the last look; a slow client may stay."""
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
