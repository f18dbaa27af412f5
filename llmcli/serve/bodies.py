"""Around the application: what all bodies that lie here hold together has an end.

One body has an end already, and a connection that sends nothing. But a thousand connections that each send seven of
eight megabytes and then wait a minute held gigabytes, and what JSON is read into is up to thirty times as large. So a
body beyond SMALL needs room that it gets whole, before it is read on, and gives back when its answer begins; smaller
ones always have it. Who waits for room is not read from: its bytes stay with its system.
"""

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from llmcli.serve.problems import Problem

SMALL = 1 << 16  # bytes of a body that need no room
AT_ONCE = 8  # bodies of the largest size
PATIENCE = 20.0  # seconds that one waits for room
LATER = 5  # seconds after which to come back


class Bodies:
    """Middleware; `most` are the bytes that one body may have."""

    def __init__(self, app: ASGIApp, most: int) -> None:
        self.app, self._most, self._free = app, most, AT_ONCE * most
        self._changed = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, counting what it brings."""
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
        """Wait for room; raises Problem where none is found in time."""
        try:
            async with asyncio.timeout(PATIENCE):
                while size > self._free:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise Problem("as many large bodies lie here as there is room for; come back", 503, code="busy") from None
        self._free -= size

    def _give(self, size: int) -> None:
        self._free += size
        self._changed.set()


def _told(scope: Scope) -> int:
    """How long the body is to be, by its own words; one that comes in chunks may be any length."""
    words = next((value for name, value in scope["headers"] if name == b"content-length"), b"")
    return int(words) if words.isdigit() and len(words) < 20 else 1 << 62
