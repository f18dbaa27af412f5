"""uvicorn's HTTP connection, with an end to how long and how large the head of a request may be.

uvicorn waits for a first request forever, and for the rest of a head that has begun; httptools, which reads them where
it is installed (Ray brings it), takes heads of any size. Nobody needs a key for either. 2026-11-22: a connection that
sent headers without an end made the server a gigabyte larger in ten seconds, and as many silent ones as there are file
descriptors keep everybody else out.
"""

import asyncio
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

PATIENCE = 60.0  # seconds until a request's head is there, from its first byte or the connection's beginning
LARGEST = 1 << 16  # bytes of a head, about, as in h11; what one read brings is read
Base: Any = AutoHTTPProtocol


class Connection(Base):  # type: ignore[misc]  # which class that is, uvicorn finds out
    """One connection; it closes itself where no request comes of it."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._head, self._late = 0, None

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Begin to wait."""
        super().connection_made(transport)
        self._wait()

    def data_received(self, data: bytes) -> None:
        """Read; what is no body of a request under way is part of a head."""
        before = self.cycle
        resting = before is None or before.response_complete
        head = resting or not before.more_body
        super().data_received(data)
        if self.cycle is not before or self.transport.get_protocol() is not self:  # it is here, or talks WebSocket
            self._head = 0
            self._calm()
        elif head and self.transport.is_reading():  # else it is kept for when the request under way is over
            self._head += len(data)
            if self._head > LARGEST:
                self.transport.close()
            elif resting:
                self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait no more."""
        self._calm()
        super().connection_lost(exc)

    def _wait(self) -> None:
        if self._late is None:
            self._late = self.loop.call_later(PATIENCE, self.transport.close)

    def _calm(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None
