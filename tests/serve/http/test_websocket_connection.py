"""WebSocket connections: a large message reserves memory early, and frees what it does not need."""

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
from tests.fixtures.event_loop import run_within
from tests.fixtures.server import Served
from tests.serve.http.routes.test_websocket import open_websocket

LARGEST = 1 << 20
READ = 1 << 18  # asyncio reads this many bytes at a time
LARGE = b"x" * (LARGEST - 100)


class Transport(asyncio.Transport):
    """A transport that records what the connection does with it."""

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


class WebSocketClient:
    """A client of a WebSocketConnection, and the messages that the application has received from it
    in `received`.
    """

    def __init__(self, budget: BodyBudget) -> None:
        self.received: list[Any] = []
        config = uvicorn.Config(
            self._app,
            interface="asgi3",
            proxy_headers=False,
            ws_max_size=LARGEST,
            ws_per_message_deflate=False,
            log_config=None,
        )
        self.connection = WebSocketConnection(
            budget, config=config, server_state=ServerState(), app_state={}
        )
        self.transport = Transport()
        self.connection.connection_made(self.transport)
        client = ClientProtocol(parse_uri("ws://localhost/v1/ws"))
        client.send_request(client.connect())
        self.connection.data_received(b"".join(client.data_to_send()))

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:
        assert (await receive())["type"] == "websocket.connect"
        await send({"type": "websocket.accept"})
        while True:
            self.received.append(await receive())
            if self.received[-1]["type"] == "websocket.disconnect":
                return

    def send(self, *fragments: bytes) -> None:
        """Send a message in these fragments, each as its own frame."""
        last = len(fragments) - 1
        for number, client in enumerate(fragments):
            opcode = Opcode.CONT if number else Opcode.TEXT
            self.feed(Frame(opcode, client, fin=number == last).serialize(mask=True))

    def feed(self, raw: bytes) -> bytes:
        """Pass bytes to the connection until it pauses reading. Return the bytes that were not
        read.
        """
        while raw and not self.transport.paused:
            self.connection.data_received(raw[:READ])
            raw = raw[READ:]
        return raw

    def code(self) -> int:
        """Return the close code that the connection has sent."""
        assert self.transport.closed
        close = self.connection.conn.close_sent
        assert close
        return int(close.code)


async def run_pending_tasks() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def run_scenario(scenario: Callable[[BodyBudget], Any]) -> None:
    async def run() -> None:
        await scenario(BodyBudget(LARGEST))

    run_within(30, run())


def test_large_messages_wait_for_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(body_budget, "MAX_LARGEST_BODIES", 1)
    raw = Frame(Opcode.TEXT, LARGE).serialize(mask=True)

    async def scenario(budget: BodyBudget) -> None:
        clients = [WebSocketClient(budget) for _ in range(5)]
        await run_pending_tasks()
        unread = [client.feed(raw) for client in clients]
        assert {len(client) for client in unread} == {len(raw) - READ}  # each has read once
        await run_pending_tasks()
        first, *others = clients
        assert [client.transport.paused for client in clients] == [False, True, True, True, True]
        assert first.feed(unread[0]) == b""
        await run_pending_tasks()
        assert first.received[0]["text"] == LARGE.decode()
        assert first.received[0][RESERVATION_KEY].size == len(LARGE)
        assert all(client.transport.paused for client in others)
        first.send(b"small")  # reserves nothing
        await run_pending_tasks()
        assert first.received[1]["text"] == "small" and not first.received[1][RESERVATION_KEY].size
        first.received[0][RESERVATION_KEY].release()
        await run_pending_tasks()
        assert [client.transport.paused for client in others] == [False, True, True, True]
        others[0].connection.connection_lost(None)  # frees the memory of its incomplete message
        await run_pending_tasks()
        assert [client.transport.paused for client in others[1:]] == [False, True, True]

    run_scenario(scenario)


def test_excess_memory_of_a_message_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_budget, "MAX_LARGEST_BODIES", 1)

    async def scenario(budget: BodyBudget) -> None:
        first, second = WebSocketClient(budget), WebSocketClient(budget)
        await run_pending_tasks()
        first.send(b"x" * SMALL_BODY_BYTES, b"x")
        second.send(b"x" * SMALL_BODY_BYTES, b"x")
        await run_pending_tasks()
        # the message was complete after the read that exceeded SMALL_BODY_BYTES
        assert [len(first.received[0]["text"]), len(second.received[0]["text"])] == [
            SMALL_BODY_BYTES + 1
        ] * 2
        incomplete = Frame(Opcode.TEXT, b"x" * (SMALL_BODY_BYTES + 1), fin=False).serialize(
            mask=True
        )
        first.feed(incomplete)
        await run_pending_tasks()
        first.feed(Frame(Opcode.CONT, b"x").serialize(mask=True))
        second.feed(incomplete)
        await run_pending_tasks()
        assert first.received[1][RESERVATION_KEY].size == SMALL_BODY_BYTES + 2
        assert second.transport.paused
        first.received[1][RESERVATION_KEY].release()
        await run_pending_tasks()
        assert not second.transport.paused

    run_scenario(scenario)


@pytest.mark.parametrize(
    ("name", "value", "code"),
    [
        ("bodies", 0, websocket_connection.TRY_AGAIN_CODE),
        ("message", 0, websocket_connection.POLICY_CODE),
    ],
)
def test_a_connection_closes_without_memory_or_after_a_timeout(
    monkeypatch: pytest.MonkeyPatch, name: str, value: float, code: int
) -> None:
    if name == "bodies":
        monkeypatch.setattr(body_budget, "RESERVE_SECONDS", value)
    else:
        monkeypatch.setattr(websocket_connection, "MESSAGE_SECONDS", value)
    monkeypatch.setattr(body_budget, "MAX_LARGEST_BODIES", int(name == "message"))

    async def scenario(budget: BodyBudget) -> None:
        client = WebSocketClient(budget)
        await run_pending_tasks()
        client.feed(Frame(Opcode.TEXT, LARGE).serialize(mask=True)[:READ])
        while not client.transport.closed:
            await asyncio.sleep(0)
        assert client.code() == code
        client.connection.connection_lost(None)
        await run_pending_tasks()
        assert client.received[-1]["type"] == "websocket.disconnect"
        if name == "message":
            (await budget.reserve(LARGEST)).release()

    run_scenario(scenario)


def test_too_many_fragments_close_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(websocket_connection, "MAX_FRAGMENTS", 4)

    async def scenario(budget: BodyBudget) -> None:
        client = WebSocketClient(budget)
        await run_pending_tasks()
        client.send(b"abcd", *(b"x",) * 3)
        await run_pending_tasks()
        assert client.received[0]["text"] == "abcdxxx"
        client.send(*(b"x",) * 5)
        assert client.code() == websocket_connection.TOO_LARGE_CODE

    run_scenario(scenario)


def test_compression_is_not_accepted(serve: Callable[..., Served]) -> None:
    with open_websocket(serve()) as socket:  # this client offers compression
        assert not socket.protocol.extensions
