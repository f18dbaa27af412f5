"""Middleware that bounds the memory of all request bodies together.

One body is bounded already, and so is a silent connection. But a thousand connections that each sent seven of eight
megabytes and then waited a minute held gigabytes, and parsed JSON takes up to thirty times the bytes. So a body larger
than SMALL must reserve room for all of itself before the rest of it is read, and frees it when its answer begins;
smaller bodies need no room. While a connection waits for room nothing is read from it: TCP holds its client back.
"""

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from llmcli.serve.problems import Problem

SMALL = 1 << 16  # bytes of a body that need no room
AT_ONCE = 8  # bodies of the largest size
PATIENCE = 20.0  # seconds that one waits for room
LATER = 5  # seconds after which to come back


class Bodies:
    """`most`: bytes that one body may have; AT_ONCE of such bodies fit at once."""

    def __init__(self, app: ASGIApp, most: int) -> None:
        self.app, self._most, self._free = app, most, AT_ONCE * most
        self._changed = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on and count the bytes of its body."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        read = held = 0

        async def taken() -> Message:
            nonlocal read, held
            message = await receive()
            part = message.get("body", b"")
            read += len(part)
            if part and read > SMALL and not held:  # a client that leaves a stream brings nothing more
                size = min(self._most, _told(scope))
                await self._take(size)
                held = size
            return message

        async def sent(message: Message) -> None:
            nonlocal held
            if message["type"] == "http.response.start":
                size, held = held, 0
                self._give(size)
            await send(message)

        try:
            await self.app(scope, taken, sent)
        finally:
            self._give(held)

    async def _take(self, size: int) -> None:
        """Wait for room. Raises Problem (503) after PATIENCE seconds without."""
        try:
            async with asyncio.timeout(PATIENCE):
                while size > self._free:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise Problem("too many large requests at once; come back later", 503, code="busy") from None
        self._free -= size

    def _give(self, size: int) -> None:
        self._free += size
        self._changed.set()


def _told(scope: Scope) -> int:
    """The body's length by its Content-Length; a chunked body may have any length."""
    words = next((value for name, value in scope["headers"] if name == b"content-length"), b"")
    return int(words) if words.isdigit() and len(words) < 20 else 1 << 62
