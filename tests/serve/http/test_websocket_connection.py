"""WebSocket connections: a large message reserves memory early and returns what it does not need."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState
from websockets.client import ClientProtocol
from websockets.frames import Frame, Opcode
from websockets.uri import parse_uri

from llmcli.serve.http import body_budget, websocket_connection
from llmcli.serve.http.body_budget import SMALL_BODY_BYTES, BodyBudget
from llmcli.serve.http.websocket_connection import RESERVATION_KEY, WebSocketConnection
from tests.fixtures.server import Served
from tests.serve.http.routes.test_websocket import opened

MOST = 1 << 20
READ = 1 << 18  # bytes of one read of asyncio's
LARGE = b"x" * (MOST - 100)


class Transport(asyncio.Transport):
    """What a connection does to its transport."""

    def __init__(self) -> None:
        super().__init__()
        self.paused = self.closed = False
        self.written = b""

    def pause_reading(self) -> None:
        self.paused = True

    def resume_reading(self) -> None:
        self.paused = False

    def write(self, data: Any) -> None:
        self.written += data

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True


class Talking:
    """A client, and the messages that the application has of it."""

    def __init__(self, room: BodyBudget) -> None:
        self.heard: list[Any] = []
        config = uvicorn.Config(
            self._app,
            interface="asgi3",
            proxy_headers=False,
            ws_max_size=MOST,
            ws_per_message_deflate=False,
            log_config=None,
        )
        self.wire = WebSocketConnection(
            room, config=config, server_state=ServerState(), app_state={}
        )
        self.transport = Transport()
        self.wire.connection_made(self.transport)
        client = ClientProtocol(parse_uri("ws://localhost/v1/ws"))
        client.send_request(client.connect())
        self.wire.data_received(b"".join(client.data_to_send()))

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:
        assert (await receive())["type"] == "websocket.connect"
        await send({"type": "websocket.accept"})
        while True:
            self.heard.append(await receive())
            if self.heard[-1]["type"] == "websocket.disconnect":
                return

    def send(self, *fragments: bytes) -> None:
        """Frames of one message, read one after the other."""
        last = len(fragments) - 1
        for number, one in enumerate(fragments):
            opcode = Opcode.CONT if number else Opcode.TEXT
            self.feed(Frame(opcode, one, fin=number == last).serialize(mask=True))

    def feed(self, raw: bytes) -> bytes:
        """As much of it as is read; what is not."""
        while raw and not self.transport.paused:
            self.wire.data_received(raw[:READ])
            raw = raw[READ:]
        return raw

    def code(self) -> int:
        """What the connection was closed with: the last frame's, behind its length."""
        assert self.transport.closed
        close = self.wire.conn.close_sent
        assert close
        return int(close.code)


async def turns() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def scene(story: Callable[[BodyBudget], Any]) -> None:
    async def told() -> None:
        await story(BodyBudget(MOST))

    asyncio.run(asyncio.wait_for(told(), 30))


def test_no_more_large_messages_lie_here_than_there_is_room_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(body_budget, "MAX_LARGEST_BODIES", 1)
    raw = Frame(Opcode.TEXT, LARGE).serialize(mask=True)

    async def story(room: BodyBudget) -> None:
        those = [Talking(room) for _ in range(5)]
        await turns()
        left = [one.feed(raw) for one in those]
        assert {len(one) for one in left} == {
            len(raw) - READ
        }  # what one read brings is not foreseen
        await turns()
        first, *others = those
        assert [one.transport.paused for one in those] == [False, True, True, True, True]
        assert first.feed(left[0]) == b""
        await turns()
        assert first.heard[0]["text"] == LARGE.decode()
        assert first.heard[0][RESERVATION_KEY].size == len(LARGE)
        assert all(one.transport.paused for one in others)
        first.send(b"small")  # needs no room
        await turns()
        assert first.heard[1]["text"] == "small" and not first.heard[1][RESERVATION_KEY].size
        first.heard[0][RESERVATION_KEY].release()
        await turns()
        assert [one.transport.paused for one in others] == [False, True, True, True]
        others[0].wire.connection_lost(None)  # who leaves in the middle gives it back
        await turns()
        assert [one.transport.paused for one in others[1:]] == [False, True, True]

    scene(story)


def test_what_a_message_does_not_need_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_budget, "MAX_LARGEST_BODIES", 1)

    async def story(room: BodyBudget) -> None:
        one, other = Talking(room), Talking(room)
        await turns()
        one.send(b"x" * SMALL_BODY_BYTES, b"x")
        other.send(b"x" * SMALL_BODY_BYTES, b"x")
        await turns()
        # Whole with the read that went beyond SMALL: these take room in the application.
        assert [len(one.heard[0]["text"]), len(other.heard[0]["text"])] == [
            SMALL_BODY_BYTES + 1
        ] * 2
        begun = Frame(Opcode.TEXT, b"x" * (SMALL_BODY_BYTES + 1), fin=False).serialize(mask=True)
        one.feed(begun)
        await turns()
        one.feed(Frame(Opcode.CONT, b"x").serialize(mask=True))
        other.feed(begun)
        await turns()
        assert one.heard[1][RESERVATION_KEY].size == SMALL_BODY_BYTES + 2
        assert other.transport.paused
        one.heard[1][RESERVATION_KEY].release()
        await turns()
        assert not other.transport.paused

    scene(story)


@pytest.mark.parametrize(
    ("name", "value", "code"),
    [
        ("bodies", 0, websocket_connection.TRY_AGAIN_CODE),
        ("wire", 0, websocket_connection.POLICY_CODE),
    ],
)
def test_who_finds_no_room_or_takes_too_long_is_sent_away(
    monkeypatch: pytest.MonkeyPatch, name: str, value: float, code: int
) -> None:
    if name == "bodies":
        monkeypatch.setattr(body_budget, "RESERVE_SECONDS", value)
    else:
        monkeypatch.setattr(websocket_connection, "MESSAGE_SECONDS", value)
    monkeypatch.setattr(body_budget, "MAX_LARGEST_BODIES", int(name == "wire"))

    async def story(room: BodyBudget) -> None:
        one = Talking(room)
        await turns()
        one.feed(Frame(Opcode.TEXT, LARGE).serialize(mask=True)[:READ])
        while not one.transport.closed:
            await asyncio.sleep(0)
        assert one.code() == code
        one.wire.connection_lost(None)
        await turns()
        assert one.heard[-1]["type"] == "websocket.disconnect"
        if name == "wire":
            (await room.reserve(MOST)).release()

    scene(story)


def test_a_message_has_not_more_fragments_than_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(websocket_connection, "MAX_FRAGMENTS", 4)

    async def story(room: BodyBudget) -> None:
        one = Talking(room)
        await turns()
        one.send(b"abcd", *(b"x",) * 3)
        await turns()
        assert one.heard[0]["text"] == "abcdxxx"
        one.send(*(b"x",) * 5)
        assert one.code() == websocket_connection.TOO_LARGE_CODE

    scene(story)


def test_messages_come_as_they_are(serve: Callable[..., Served]) -> None:
    with opened(serve()) as socket:  # this client offers to compress them
        assert not socket.protocol.extensions
