"""uvicorn's HTTP connection with four more limits: on an incomplete request head, on a body that
the application does not read, on a response that the client does not read, and on data that a
client sends while its previous request is being answered.

uvicorn waits without limit for the first request of a connection and for the end of a head, so
silent connections could use up all file descriptors. If bytes that are not HTTP follow a running
request, h11 causes a traceback.

Heads are always parsed by h11. uvicorn would choose httptools where another package has installed
it, which refuses unknown methods as broken HTTP and writes the names of headers in lower case.
"""

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

# Time for a request's head, from its first byte or from the start of the connection; and time in
# which a client must read some bytes of a response.
TIMEOUT_SECONDS = 60.0
MAX_HEAD_BYTES = 1 << 16  # as in h11; a single read may exceed it a little
# Bytes of a body that may arrive after its response: many clients read only after they have sent
# everything.
MAX_UNREAD_BODY_BYTES = 1 << 26


class HttpConnection(H11Protocol):
    """One HTTP connection. It closes itself if no request arrives in time, or if the client does
    not read the response.
    """

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._head = self._unread_body = self._unsent = 0
        self._head_timer: asyncio.TimerHandle | None = None
        self._read_timer: asyncio.TimerHandle | None = None

    def connection_made(  # type: ignore[override]  # uvicorn's type
        self, transport: asyncio.Transport
    ) -> None:
        """Start the timer for the first request head."""
        super().connection_made(transport)
        self._start_head_timer()

    def data_received(self, data: bytes) -> None:
        """Parse the data. Then count its bytes, either as part of a head, or as part of a body that
        nobody reads because its response was already sent.
        """
        previous_cycle = self.cycle
        is_idle = previous_cycle is None or previous_cycle.response_complete
        in_unread_body = (
            previous_cycle is not None
            and previous_cycle.response_complete
            and previous_cycle.more_body
        )
        in_head = not in_unread_body and (is_idle or not previous_cycle.more_body)
        super().data_received(data)
        # a request was parsed, or the connection has become a WebSocket
        if self.cycle is not previous_cycle or self.transport.get_protocol() is not self:
            self._head = self._unread_body = 0
            self._stop_head_timer()
        elif in_unread_body:
            self._unread_body += len(data)
            self._enforce_limit(self._unread_body, MAX_UNREAD_BODY_BYTES)
        # If reading is paused, uvicorn stores the data until the running request has ended.
        elif in_head and self.transport.is_reading():
            self._head += len(data)
            self._enforce_limit(self._head, MAX_HEAD_BYTES, wait=is_idle)

    def send_400_response(self, msg: str) -> None:
        """Respond to bytes that are not HTTP. While another response is being sent, close the
        connection after that response instead.
        """
        cycle = self.cycle
        is_complete = cycle is None or cycle.response_complete
        if is_complete and (cycle is None or not cycle.more_body):
            super().send_400_response(msg)
        elif is_complete:  # the bytes belong to a body whose response was already sent
            self.transport.close()
        elif cycle.more_body and not cycle.response_started:
            super().send_400_response(msg)
        else:
            cycle.keep_alive = False
            self.flow.pause_reading()

    def pause_writing(self) -> None:
        """Start a timer, because the client reads more slowly than the server writes."""
        super().pause_writing()
        self._unsent = self.transport.get_write_buffer_size()
        self._read_timer = self.loop.call_later(TIMEOUT_SECONDS, self._check_reader)

    def resume_writing(self) -> None:
        """Stop the timer, because the client has read enough."""
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
        """Close the connection if the client has read nothing since the last check. A client that
        reads slowly may continue.
        """
        unread = self.transport.get_write_buffer_size()
        if unread >= self._unsent:
            self.transport.abort()
        else:
            self._unsent = unread
            self._read_timer = self.loop.call_later(TIMEOUT_SECONDS, self._check_reader)

    def _enforce_limit(self, count: int, limit: int, wait: bool = True) -> None:
        """Close the connection if `count` exceeds `limit`. Otherwise start the timer for a request
        head, if `wait`.
        """
        if count > limit:
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
