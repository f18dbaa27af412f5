"""uvicorn's WebSocket connection, which reserves memory for a large message before the rest of it
is read (body_budget.py).

An application receives only complete messages, so without this each of a thousand connections could
hold one of the largest size. A message that is incomplete after SMALL_BODY_BYTES reserves the
largest size of a message, and nothing is read until it has; once the message is complete, the
excess is freed. What a single read brings (256 KB at most) is not limited. Compressed messages are
not accepted (server.py): a kilobyte on the wire may be a megabyte, and memory is counted by the
wire.
"""

import asyncio
from collections import deque
from typing import Any

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import Frame

from llmcli.serve.bodies import SMALL, Place, Room
from llmcli.serve.problems import Problem

PLACE = "llmcli.place"  # in a message: its reservation
PATIENCE = 60.0  # seconds from the reservation to the end of a message
FRAGMENTS = 1 << 16  # of one message: each is an object, even if it has one byte
LATER, LATE, LARGE = 1013, 1008, 1009  # WebSocket close codes


class Wire(WebSocketsSansIOProtocol):
    """One connection; `room` is the budget of all bodies."""

    def __init__(self, room: Room, **more: Any) -> None:
        super().__init__(**more)
        self._room = room
        self._size = 0  # bytes of the incomplete message, in fragments
        self._place: Place | None = None  # of the incomplete message
        # of messages that the application has not received yet
        self._places: deque[Place] = deque()
        self._asking: asyncio.Task[None] | None = None
        self._late: asyncio.TimerHandle | None = None

    def data_received(self, data: bytes) -> None:
        """Parse the data, then reserve memory if an incomplete message needs it."""
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
            PATIENCE, self._end, LATE, f"a message did not arrive within {PATIENCE:.0f} s"
        )
        if not self.read_paused:
            self.transport.resume_reading()

    def _end(self, code: int, why: str) -> None:
        """Close the connection with a code and a reason."""
        if not self.close_sent:
            self.conn.fail(code, why)
            self.handle_parser_exception()

    def handle_text(self, event: Frame) -> None:
        """Handle a text message or its first fragment."""
        self._size = len(event.data)
        super().handle_text(event)

    def handle_bytes(self, event: Frame) -> None:
        """Handle a binary message or its first fragment."""
        self._size = len(event.data)
        super().handle_bytes(event)

    def handle_cont(self, event: Frame) -> None:
        """Handle a further fragment."""
        self._size += len(event.data)
        if len(self.frames) < FRAGMENTS:
            super().handle_cont(event)
        else:
            self._end(LARGE, f"the message has more than {FRAGMENTS:,} fragments")

    def send_receive_event_to_app(self) -> None:
        """Deliver a complete message with its reservation."""
        place, self._place = self._place or Place(self._room, 0), None
        place.keep(self._size)
        self._size = 0
        if self._late is not None:
            self._late.cancel()
        self._places.append(place)
        super().send_receive_event_to_app()

    async def receive(self) -> Any:
        """Return the application's next message. The application must release its reservation."""
        message: Any = await super().receive()
        if self._asking is not None:  # an incomplete message still waits for its reservation
            self.transport.pause_reading()
        if message["type"] == "websocket.receive":
            message[PLACE] = self._places.popleft()
        return message

    def connection_lost(self, exc: Exception | None) -> None:
        """Release the reservations of messages that were not received."""
        if self._asking is not None:
            self._asking.cancel()
        if self._late is not None:
            self._late.cancel()
        for place in (*self._places, *((self._place,) if self._place else ())):
            place.leave()
        super().connection_lost(exc)
