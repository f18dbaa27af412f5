"""Limits the memory of all request bodies together, whatever protocol they use.

Every single body is limited, but a thousand connections that each send most of a large body and
then wait would hold gigabytes, and parsed JSON takes up to thirty times the bytes. So a body of
more than SMALL_BODY_BYTES must reserve its whole size before the rest is read, and frees it when
its answer begins; smaller bodies need no reservation. While a connection waits for a reservation,
nothing is read from it: TCP makes its client wait.

Messages of WebSockets follow the same rule (websocket_connection.py). The length of a gRPC request
is unknown until it is complete, so few are read at once, and they reserve memory afterwards
(grpc/service.py).
"""

import asyncio
from typing import Self

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from llmcli.api.errors import ApiError

SMALL_BODY_BYTES = 1 << 16  # larger bodies need a reservation
MAX_LARGEST_BODIES = 8  # bodies of the largest size that fit at once
RESERVE_SECONDS = 20.0  # seconds to wait for a reservation
RETRY_AFTER_SECONDS = 5  # seconds of Retry-After


class BodyReservation:
    """Memory that one body has reserved. release(), or the end of a `with`, frees it; further calls
    do nothing.
    """

    def __init__(self, budget: "BodyBudget", size: int) -> None:
        self._budget, self._size = budget, size

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    @property
    def size(self) -> int:
        """Bytes; 0 if none were needed or they were released."""
        return self._size

    def shrink(self, size: int) -> None:
        """Free what exceeds `size`, the body's actual size in bytes."""
        excess = max(0, self._size - size)
        self._size -= excess
        self._budget.free(excess)

    def release(self) -> None:
        """Free the memory: the body is parsed, or its answer is no longer wanted."""
        size, self._size = self._size, 0
        self._budget.free(size)


class BodyBudget:
    """The shared budget of all bodies: eight of the largest size, `max_body` bytes, fit at once."""

    def __init__(self, max_body: int) -> None:
        self._most, self._free = max_body, MAX_LARGEST_BODIES * max_body
        self._changed = asyncio.Event()

    async def reserve(self, size: int) -> BodyReservation:
        """Reserve `size` bytes, at most the largest size of a body. Raises ApiError (503) after
        RESERVE_SECONDS.
        """
        if size <= SMALL_BODY_BYTES:
            return BodyReservation(self, 0)
        size = min(size, self._most)
        try:
            async with asyncio.timeout(RESERVE_SECONDS):
                while size > self._free:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise ApiError(
                "too many large requests at once; retry later", 503, code="busy"
            ) from None
        self._free -= size
        return BodyReservation(self, size)

    def free(self, size: int) -> None:
        """Return bytes to the budget."""
        self._free += size
        self._changed.set()


class BodyBudgetMiddleware:
    """Middleware that reserves memory for the bodies of HTTP requests."""

    def __init__(self, app: ASGIApp, budget: BodyBudget) -> None:
        self.app, self._budget = app, budget

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward a request and count the bytes of its body."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        read, reservation, reserved = 0, BodyReservation(self._budget, 0), False

        async def counted_receive() -> Message:
            nonlocal read, reservation, reserved
            message = await receive()
            chunk = message.get("body", b"")
            read += len(chunk)
            # A client that leaves a stream brings no more bytes.
            if chunk and read > SMALL_BODY_BYTES and not reserved:
                reservation, reserved = await self._budget.reserve(_content_length(scope)), True
            return message

        async def releasing_send(message: Message) -> None:
            nonlocal reserved
            if message["type"] == "http.response.start":
                reservation.release()
                reserved = False
            await send(message)

        try:
            await self.app(scope, counted_receive, releasing_send)
        finally:
            reservation.release()


def _content_length(scope: Scope) -> int:
    """Return the body's length by its Content-Length; a chunked body may have any length."""
    length = next((value for name, value in scope["headers"] if name == b"content-length"), b"")
    return int(length) if length.isdigit() and len(length) < 20 else 1 << 62
