"""Bounds the memory of all request bodies together, over whichever protocol they come.

One body is bounded already, and so is a silent connection. But a thousand connections that each
sent seven of eight megabytes and then waited a minute held gigabytes, and parsed JSON takes up to
thirty times the bytes. So a body larger than SMALL must reserve room for all of itself before the
rest of it is read, and frees it when its answer begins; smaller bodies need no room. While a
connection waits for room nothing is read from it: TCP holds its client back.

Messages over WebSockets do the same (wire.py). Of gRPC's, which have no length before they are
whole, few are read at once, and they take room when they are (procedures.py).
"""

import asyncio
from typing import Self

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from llmcli.serve.problems import Problem

SMALL = 1 << 16  # bytes of a body that need no room
AT_ONCE = 8  # bodies of the largest size
PATIENCE = 20.0  # seconds that one waits for room
LATER = 5  # seconds after which to come back


class Place:
    """What one body has reserved. leave(), or the end of a `with`, frees it, once however often it
    is called.
    """

    def __init__(self, room: "Room", size: int) -> None:
        self._room, self._size = room, size

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()

    @property
    def size(self) -> int:
        """Bytes; 0 where none were needed, or it was left."""
        return self._size

    def keep(self, size: int) -> None:
        """The body is no larger than that: give back the rest."""
        rest = max(0, self._size - size)
        self._size -= rest
        self._room.give(rest)

    def leave(self) -> None:
        """The body is read, or nobody waits for its answer any more."""
        size, self._size = self._size, 0
        self._room.give(size)


class Room:
    """The one account of all bodies: AT_ONCE of the largest size, `most` bytes, fit at once."""

    def __init__(self, most: int) -> None:
        self._most, self._free = most, AT_ONCE * most
        self._changed = asyncio.Event()

    async def take(self, size: int) -> Place:
        """Reserve for a body of `size` bytes, or of the largest size. Raises Problem (503) after
        PATIENCE seconds.
        """
        if size <= SMALL:
            return Place(self, 0)
        size = min(size, self._most)
        try:
            async with asyncio.timeout(PATIENCE):
                while size > self._free:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise Problem(
                "too many large requests at once; come back later", 503, code="busy"
            ) from None
        self._free -= size
        return Place(self, size)

    def give(self, size: int) -> None:
        """Free so many bytes."""
        self._free += size
        self._changed.set()


class Bodies:
    """Middleware that takes room for the bodies of HTTP requests."""

    def __init__(self, app: ASGIApp, room: Room) -> None:
        self.app, self._room = app, room

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on and count the bytes of its body."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        read, place, reserved = 0, Place(self._room, 0), False

        async def taken() -> Message:
            nonlocal read, place, reserved
            message = await receive()
            part = message.get("body", b"")
            read += len(part)
            if (
                part and read > SMALL and not reserved
            ):  # a client that leaves a stream brings nothing more
                place, reserved = await self._room.take(_told(scope)), True
            return message

        async def sent(message: Message) -> None:
            nonlocal reserved
            if message["type"] == "http.response.start":
                place.leave()
                reserved = False
            await send(message)

        try:
            await self.app(scope, taken, sent)
        finally:
            place.leave()


def _told(scope: Scope) -> int:
    """The body's length by its Content-Length; a chunked body may have any length."""
    words = next((value for name, value in scope["headers"] if name == b"content-length"), b"")
    return int(words) if words.isdigit() and len(words) < 20 else 1 << 62
