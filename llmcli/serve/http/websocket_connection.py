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

from llmcli.api.errors import ApiError
from llmcli.serve.http.body_budget import SMALL_BODY_BYTES, BodyBudget, BodyReservation

RESERVATION_KEY = "llmcli.place"  # in a message: its reservation
MESSAGE_SECONDS = 60.0  # seconds from the reservation to the end of a message
MAX_FRAGMENTS = 1 << 16  # of one message: each is an object, even if it has one byte
TRY_AGAIN_CODE, POLICY_CODE, TOO_LARGE_CODE = 1013, 1008, 1009  # WebSocket close codes


class WebSocketConnection(WebSocketsSansIOProtocol):
    """One connection; `budget` is shared by all bodies."""

    def __init__(self, budget: BodyBudget, **more: Any) -> None:
        super().__init__(**more)
        self._budget = budget
        self._size = 0  # bytes of the incomplete message, in fragments
        self._reservation: BodyReservation | None = None  # of the incomplete message
        # of messages that the application has not received yet
        self._reservations: deque[BodyReservation] = deque()
        self._reserving: asyncio.Task[None] | None = None
        self._message_timer: asyncio.TimerHandle | None = None

    def data_received(self, data: bytes) -> None:
        """Parse the data, then reserve memory if an incomplete message needs it."""
        super().data_received(data)
        unread = self._size + len(self.conn.reader.buffer)
        if (
            unread > SMALL_BODY_BYTES
            and self._reservation is None
            and not self.transport.is_closing()
        ):
            self.transport.pause_reading()
            if self._reserving is None:
                self._reserving = self.loop.create_task(self._reserve())

    async def _reserve(self) -> None:
        try:
            self._reservation = await self._budget.reserve(self.config.ws_max_size)
        except ApiError as error:
            self._fail(TRY_AGAIN_CODE, str(error))
            return
        finally:
            self._reserving = None
        self._message_timer = self.loop.call_later(
            MESSAGE_SECONDS,
            self._fail,
            POLICY_CODE,
            f"a message did not arrive within {MESSAGE_SECONDS:.0f} s",
        )
        if not self.read_paused:
            self.transport.resume_reading()

    def _fail(self, code: int, why: str) -> None:
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
        if len(self.frames) < MAX_FRAGMENTS:
            super().handle_cont(event)
        else:
            self._fail(TOO_LARGE_CODE, f"the message has more than {MAX_FRAGMENTS:,} fragments")

    def send_receive_event_to_app(self) -> None:
        """Deliver a complete message with its reservation."""
        reservation, self._reservation = self._reservation or BodyReservation(self._budget, 0), None
        reservation.shrink(self._size)
        self._size = 0
        if self._message_timer is not None:
            self._message_timer.cancel()
        self._reservations.append(reservation)
        super().send_receive_event_to_app()

    async def receive(self) -> Any:
        """Return the application's next message. The application must release its reservation."""
        message: Any = await super().receive()
        if self._reserving is not None:  # an incomplete message still waits for its reservation
            self.transport.pause_reading()
        if message["type"] == "websocket.receive":
            message[RESERVATION_KEY] = self._reservations.popleft()
        return message

    def connection_lost(self, exc: Exception | None) -> None:
        """Release the reservations of messages that were not received."""
        if self._reserving is not None:
            self._reserving.cancel()
        if self._message_timer is not None:
            self._message_timer.cancel()
        for reservation in (
            *self._reservations,
            *((self._reservation,) if self._reservation else ()),
        ):
            reservation.release()
        super().connection_lost(exc)
