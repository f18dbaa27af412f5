"""uvicorn's WebSocket connection with a limit on the memory of incomplete messages
(body_budget.py).

An application only receives complete messages. Without a limit, each of a thousand connections
could store an incomplete message of the largest size. So a message that is still incomplete after
SMALL_BODY_BYTES must reserve memory for the largest size, and nothing is read from its connection
until then. Once the message is complete, the excess is freed. The bytes of a single read (256 KB at
most) are not limited. Compressed messages are not accepted (server.py), because only the bytes on
the wire are counted, and a kilobyte of them may become a megabyte.
"""

import asyncio
from collections import deque
from typing import Any

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import Frame

from llmcli.api.errors import ApiError
from llmcli.serve.http.body_budget import SMALL_BODY_BYTES, BodyBudget, BodyReservation

RESERVATION_KEY = "llmcli.reservation"  # key of the reservation in an ASGI message
MESSAGE_SECONDS = 60.0  # time from the reservation to the end of a message
MAX_FRAGMENTS = 1 << 16  # of one message; even a fragment of one byte is an object in memory
TRY_AGAIN_CODE, POLICY_CODE, TOO_LARGE_CODE = 1013, 1008, 1009  # WebSocket close codes


class WebSocketConnection(WebSocketsSansIOProtocol):
    """One WebSocket connection. `budget`: the memory for large bodies on this server."""

    def __init__(self, budget: BodyBudget, **more: Any) -> None:
        super().__init__(**more)
        self._budget = budget
        self._size = 0  # bytes of the incomplete message in its earlier fragments
        self._reservation: BodyReservation | None = None  # for the incomplete message
        # for complete messages that the application has not received yet
        self._reservations: deque[BodyReservation] = deque()
        self._reserving: asyncio.Task[None] | None = None
        self._message_timer: asyncio.TimerHandle | None = None

    def data_received(self, data: bytes) -> None:
        """Parse the data. Then reserve memory if a large message is incomplete."""
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
        """Reserve memory for the incomplete message, then read on. Close the connection if the
        memory is not available in time, or if the rest of the message does not arrive in time.
        """
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

    def _fail(self, code: int, reason: str) -> None:
        """Close the connection with a WebSocket close code and a reason."""
        if not self.close_sent:
            self.conn.fail(code, reason)
            self.handle_parser_exception()

    def handle_text(self, event: Frame) -> None:
        """Handle a text message, or its first fragment."""
        self._size = len(event.data)
        super().handle_text(event)

    def handle_bytes(self, event: Frame) -> None:
        """Handle a binary message, or its first fragment."""
        self._size = len(event.data)
        super().handle_bytes(event)

    def handle_cont(self, event: Frame) -> None:
        """Handle a later fragment of a message. Close the connection after too many of them."""
        self._size += len(event.data)
        if len(self.frames) < MAX_FRAGMENTS:
            super().handle_cont(event)
        else:
            self._fail(TOO_LARGE_CODE, f"the message has more than {MAX_FRAGMENTS:,} fragments")

    def send_receive_event_to_app(self) -> None:
        """Put a complete message, and its reservation, into the application's queue."""
        reservation, self._reservation = self._reservation or BodyReservation(self._budget, 0), None
        reservation.shrink(self._size)
        self._size = 0
        if self._message_timer is not None:
            self._message_timer.cancel()
        self._reservations.append(reservation)
        super().send_receive_event_to_app()

    async def receive(self) -> Any:
        """Return the next ASGI message for the application. The reservation of a WebSocket message
        is under RESERVATION_KEY; the application must release it.
        """
        message: Any = await super().receive()
        # the next message is incomplete and waits for its reservation
        if self._reserving is not None:
            self.transport.pause_reading()
        if message["type"] == "websocket.receive":
            message[RESERVATION_KEY] = self._reservations.popleft()
        return message

    def connection_lost(self, exc: Exception | None) -> None:
        """Release the reservations of the messages that the application has not received."""
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
