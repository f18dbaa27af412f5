"""uvicorn's HTTP connection with limits: on an unfinished head, on a body that is not read, on an
answer that the client does not read, and on what a client sends while its previous request is still
being answered.

uvicorn waits without limit for a first request and for the rest of a head, and httptools, which
parses heads where it is installed (Ray installs it), accepts heads of any size. So one connection
could fill the memory, and silent connections could take all file descriptors. Bytes after a running
request that are not HTTP caused a traceback with h11, and a second answer inside the first with
httptools.
"""

import asyncio
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

# Seconds for a request's head, from its first byte or from the start of the connection.
TIMEOUT_SECONDS = 60.0
MAX_HEAD_BYTES = 1 << 16  # bytes of a head, as in h11; one read may bring a little more
# Bytes of a body that may follow its answer: many clients read only after they have sent all.
MAX_UNREAD_BODY_BYTES = 1 << 26
BaseConnection: Any = AutoHTTPProtocol


class HttpConnection(BaseConnection):  # type: ignore[misc]  # uvicorn chooses the class
    """One connection. It closes itself when no request arrives or the client reads no answer."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._head = self._unread_body = self._unsent = 0
        self._head_timer: asyncio.TimerHandle | None = None
        self._read_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Start the timer of the first head."""
        super().connection_made(transport)
        self._start_head_timer()

    def data_received(self, data: bytes) -> None:
        """Parse the data, then count its bytes as part of a head, of a body, or of a body that was
        answered before it was read.
        """
        before = self.cycle
        is_idle = before is None or before.response_complete
        in_unread_body = before is not None and before.response_complete and before.more_body
        in_head = not in_unread_body and (is_idle or not before.more_body)
        super().data_received(data)
        # A request was parsed, or the connection is a WebSocket now.
        if self.cycle is not before or self.transport.get_protocol() is not self:
            self._head = self._unread_body = 0
            self._stop_head_timer()
        elif in_unread_body:
            self._unread_body += len(data)
            self._limit(self._unread_body, MAX_UNREAD_BODY_BYTES)
        # While reading is paused, uvicorn keeps the data until the running request has ended.
        elif in_head and self.transport.is_reading():
            self._head += len(data)
            self._limit(self._head, MAX_HEAD_BYTES, wait=is_idle)

    def send_400_response(self, msg: str) -> None:
        """Respond to bytes that are not HTTP if no other answer is running; otherwise close the
        connection after it.
        """
        cycle = self.cycle
        is_complete = cycle is None or cycle.response_complete
        if is_complete and (cycle is None or not cycle.more_body):
            super().send_400_response(msg)
        elif is_complete:  # the rest of a body that was answered before it was read
            self.transport.close()
        elif cycle.more_body and not (cycle.response_started or getattr(self, "pipeline", None)):
            super().send_400_response(msg)
        else:
            cycle.keep_alive = False
            self.flow.pause_reading()

    def pause_writing(self) -> None:
        """Start the timer of a client that reads more slowly than the server writes."""
        super().pause_writing()
        self._unsent = self.transport.get_write_buffer_size()
        self._read_timer = self.loop.call_later(TIMEOUT_SECONDS, self._check_reader)

    def resume_writing(self) -> None:
        """Stop the timer: the client has caught up."""
        if self._read_timer is not None:
            self._read_timer.cancel()
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop all timers."""
        self._stop_head_timer()
        if self._read_timer is not None:
            self._read_timer.cancel()
        super().connection_lost(exc)

    def _check_reader(self) -> None:
        """Abort if the client has read nothing since the last check; a slow client may continue."""
        unread = self.transport.get_write_buffer_size()
        if unread >= self._unsent:
            self.transport.abort()
        else:
            self._unsent = unread
            self._read_timer = self.loop.call_later(TIMEOUT_SECONDS, self._check_reader)

    def _limit(self, count: int, most: int, wait: bool = True) -> None:
        if count > most:
            self.transport.close()
        elif wait:
            self._start_head_timer()

    def _start_head_timer(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(TIMEOUT_SECONDS, self.transport.close)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
