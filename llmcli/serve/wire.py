"""uvicorn's WebSocket connection, which takes room for a large message before the rest of it is
read (bodies.py).

A message is whole before an application sees it: without this each of a thousand connections could
hold one of the largest size. So, as over HTTP, a message of which more than SMALL bytes lie here
without its end takes room for the largest there may be, and nothing is read until there is; once it
is whole, what it does not need is given back. What one read brings (256 KB at most) is not
foreseen. Compressed messages are not taken (server.py): a kilobyte of the wire may be a megabyte,
and room is counted by the wire.
"""

import asyncio
from collections import deque
from typing import Any

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import Frame

from llmcli.serve.bodies import SMALL, Place, Room
from llmcli.serve.problems import Problem

PLACE = "llmcli.place"  # in a message: the room that it has
PATIENCE = 60.0  # seconds from when a message has room to its end
FRAGMENTS = 1 << 16  # of one message: each is an object of its own, though it brings one byte
LATER, LATE, LARGE = 1013, 1008, 1009  # codes that a connection is closed with


class Wire(WebSocketsSansIOProtocol):
    """One connection; `room` is the account of all bodies."""

    def __init__(self, room: Room, **more: Any) -> None:
        super().__init__(**more)
        self._room = room
        self._size = 0  # bytes of the message that is not whole, in fragments
        self._place: Place | None = None  # that message's
        self._places: deque[Place] = deque()  # of those that the application has not taken yet
        self._asking: asyncio.Task[None] | None = None
        self._late: asyncio.TimerHandle | None = None

    def data_received(self, data: bytes) -> None:
        """Read, then look whether what is not whole needs room."""
        super().data_received(data)
        unread = self._size + len(self.conn.reader.buffer)
        if unread > SMALL and self._place is None and not self.transport.is_closing():
            self.transport.pause_reading()
            if self._asking is None:
                self._asking = self.loop.create_task(self._ask())

    async def _ask(self) -> None:
        try:
            self._place = await self._room.take(self.config.ws_max_size)
        except Problem as error:
            self._end(LATER, str(error))
            return
        finally:
            self._asking = None
        self._late = self.loop.call_later(
            PATIENCE, self._end, LATE, f"a message was not whole within {PATIENCE:.0f} s"
        )
        if not self.read_paused:
            self.transport.resume_reading()

    def _end(self, code: int, why: str) -> None:
        """Close it, telling why."""
        if not self.close_sent:
            self.conn.fail(code, why)
            self.handle_parser_exception()

    def handle_text(self, event: Frame) -> None:
        """A message, or its first fragment."""
        self._size = len(event.data)
        super().handle_text(event)

    def handle_bytes(self, event: Frame) -> None:
        """The same, of bytes."""
        self._size = len(event.data)
        super().handle_bytes(event)

    def handle_cont(self, event: Frame) -> None:
        """A further fragment."""
        self._size += len(event.data)
        if len(self.frames) < FRAGMENTS:
            super().handle_cont(event)
        else:
            self._end(LARGE, f"a message has at most {FRAGMENTS:,} fragments")

    def send_receive_event_to_app(self) -> None:
        """The message is whole: its room goes with it."""
        place, self._place = self._place or Place(self._room, 0), None
        place.keep(self._size)
        self._size = 0
        if self._late is not None:
            self._late.cancel()
        self._places.append(place)
        super().send_receive_event_to_app()

    async def receive(self) -> Any:
        """The application's next message. Its room is the application's to give back."""
        message: Any = await super().receive()
        if self._asking is not None:  # what is not whole still waits
            self.transport.pause_reading()
        if message["type"] == "websocket.receive":
            message[PLACE] = self._places.popleft()
        return message

    def connection_lost(self, exc: Exception | None) -> None:
        """Give back the room of what nobody has taken."""
        if self._asking is not None:
            self._asking.cancel()
        if self._late is not None:
            self._late.cancel()
        for place in (*self._places, *((self._place,) if self._place else ())):
            place.leave()
        super().connection_lost(exc)
