"""Limits the memory that all request bodies occupy together, in all protocols.

The size of each body is limited. Still, a thousand connections that each send most of a large body
and then wait would occupy gigabytes, and parsed JSON takes up to thirty times its bytes. So a body
of more than SMALL_BODY_BYTES must reserve memory for its whole size before the rest of it is read.
The memory is freed when its answer begins. While a connection waits for a reservation, nothing is
read from it, and TCP's flow control stops its client.

WebSocket messages follow the same rule (websocket_connection.py). The length of a gRPC request is
unknown until it has arrived, so only a few are read at once, and memory is reserved afterwards
(grpc/service.py).
"""

import asyncio
from typing import Self

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from llmcli.api.errors import ApiError

SMALL_BODY_BYTES = 1 << 16  # larger bodies need a reservation
MAX_LARGEST_BODIES = 8  # number of bodies of the largest size that fit into the budget
RESERVE_SECONDS = 20.0  # seconds to wait for a reservation
RETRY_AFTER_SECONDS = 5  # seconds of Retry-After


class BodyReservation:
    """Memory that is reserved for one body. release(), or the end of a `with` block, frees it;
    calling release() again does nothing.
    """

    def __init__(self, budget: "BodyBudget", size: int) -> None:
        self._budget, self._size = budget, size

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    @property
    def size(self) -> int:
        """Reserved bytes; 0 if the body is small or the memory was freed."""
        return self._size

    def shrink(self, size: int) -> None:
        """Reduce the reservation to `size` bytes, once the actual size of the body is known."""
        excess = max(0, self._size - size)
        self._size -= excess
        self._budget.free(excess)

    def release(self) -> None:
        """Free the memory: the answer has begun, so the body is not needed any more."""
        size, self._size = self._size, 0
        self._budget.free(size)


class BodyBudget:
    """The memory for large bodies on one server: MAX_LARGEST_BODIES times `max_body`, the size of
    the largest body in bytes.
    """

    def __init__(self, max_body: int) -> None:
        self._max_body, self._free = max_body, MAX_LARGEST_BODIES * max_body
        self._changed = asyncio.Event()

    async def reserve(self, size: int) -> BodyReservation:
        """Reserve `size` bytes, at most the size of the largest body; nothing for a small body.
        Wait if less memory is free. Raises ApiError (503) after RESERVE_SECONDS.
        """
        if size <= SMALL_BODY_BYTES:
            return BodyReservation(self, 0)
        size = min(size, self._max_body)
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
        """Return bytes to the budget. Called by BodyReservation."""
        self._free += size
        self._changed.set()


class BodyBudgetMiddleware:
    """ASGI middleware that reserves memory for large bodies of HTTP requests while they are
    received. `streamed_paths`: paths whose bodies are written to the disk while they arrive.
    """

    def __init__(
        self, app: ASGIApp, budget: BodyBudget, streamed_paths: tuple[str, ...] = ()
    ) -> None:
        self.app, self._budget, self._streamed_paths = app, budget, streamed_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application for a request. Memory is reserved when its body exceeds
        SMALL_BODY_BYTES, and freed when the response begins.
        """
        if scope["type"] != "http" or scope.get("path") in self._streamed_paths:
            await self.app(scope, receive, send)
            return
        n_received, reservation, reserved = 0, BodyReservation(self._budget, 0), False

        async def counted_receive() -> Message:
            nonlocal n_received, reservation, reserved
            message = await receive()
            chunk = message.get("body", b"")
            n_received += len(chunk)
            # `chunk` is empty in the message that reports the client's disconnect
            if chunk and n_received > SMALL_BODY_BYTES and not reserved:
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
    """Return the Content-Length of a request; without one (a chunked body), a number larger than
    any limit.
    """
    length = next((value for name, value in scope["headers"] if name == b"content-length"), b"")
    return int(length) if length.isdigit() and len(length) < 20 else 1 << 62
