"""The WebSocket gives the same answers as the HTTP API, several at once, and each can be
cancelled.
"""

import asyncio
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from llmcli.serve.http.body_budget import BodyBudget
from llmcli.serve.http.routes.websocket import SocketSession
from tests.api.forms.test_openai_chat import HELLO, client
from tests.fixtures.server import Served

CHAT = "/v1/chat/completions"


@contextmanager
def open_websocket(served: Served, **more: Any) -> Iterator[ClientConnection]:
    address = f"{served.v1.replace('http', 'ws', 1)}/ws"
    # without a limit on the queue, a client that does not read can still close in time
    with connect(address, max_queue=None, **more) as socket:
        yield socket


def send_request(socket: ClientConnection, name: str, path: str = CHAT, **body: Any) -> None:
    request_body = {"messages": HELLO, **body} if path == CHAT else body
    socket.send(json.dumps({"id": name, "path": path, "body": request_body}))


def receive_answers(socket: ClientConnection, *names: str) -> dict[str, list[dict[str, Any]]]:
    """Return the messages of each id until all of them have ended."""
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    ended: set[str] = set()
    while ended != set(names):
        message = json.loads(socket.recv(timeout=60))
        found[message.pop("id")].append(message)
        ended |= {
            name
            for name, messages in found.items()
            if messages and messages[-1].keys() & {"done", "error"}
        }
    return found


def joined_text(messages: list[dict[str, Any]]) -> str:
    choices = [choice for item in messages if "data" in item for choice in item["data"]["choices"]]
    return "".join(choice["delta"].get("content") or "" for choice in choices)


def test_answers_equal_those_of_http(tiny: Served) -> None:
    with client(tiny) as api:
        complete = api.chat.completions.create(model="tiny", messages=HELLO, max_tokens=12)
        vector = api.embeddings.create(model="tiny", input="a cat", encoding_format="float")
    with open_websocket(tiny) as socket:
        send_request(socket, "a", max_tokens=12, stream=True)
        send_request(socket, "b", max_tokens=12)
        send_request(socket, "c", "/v1/embeddings", input="a cat")
        found = receive_answers(socket, "a", "b", "c")
    assert joined_text(found["a"]) == complete.choices[0].message.content
    assert found["a"][-2]["data"]["choices"][0]["finish_reason"] == "length"
    assert found["a"][-1] == {"done": True}
    assert [set(item) for item in found["b"]] == [{"data"}, {"done"}]
    assert (
        found["b"][0]["data"]["choices"][0]["message"]["content"]
        == complete.choices[0].message.content
    )
    assert found["c"][0]["data"]["data"][0]["embedding"] == pytest.approx(
        vector.data[0].embedding, abs=1e-3
    )


def test_cancelling_a_request_does_not_affect_others(serve: Callable[..., Served]) -> None:
    served = serve(b"x" * 400)
    with open_websocket(served) as socket:
        send_request(socket, "long", stream=True)
        first = json.loads(socket.recv(timeout=60))
        assert first["id"] == "long"
        send_request(socket, "short", stream=True, max_tokens=5)
        socket.send(json.dumps({"id": "long", "cancel": True}))
        socket.send(json.dumps({"id": "unknown", "cancel": True}))  # is ignored
        found = receive_answers(socket, "long", "short")
        assert found["long"][-1] in ({"done": True, "cancelled": True}, {"done": True})
        assert joined_text(found["short"]) == "xxxxx"
        send_request(socket, "never", stream=True)
        socket.send(json.dumps({"id": "never", "cancel": True}))  # possibly before it has begun
        assert receive_answers(socket, "never")["never"][-1]["done"]
        send_request(
            socket, "long", stream=True, max_tokens=1
        )  # the id of a finished request is free
        assert joined_text(receive_answers(socket, "long")["long"]) == "x"


@pytest.mark.parametrize(
    ("message", "error", "code"),
    [
        ("nonsense", "not JSON", None),
        ("[]", "must be a JSON object", None),
        ("{}", "id is missing", None),
        ('{"id": 5}', "id must be text", None),
        ('{"id": ""}', "1 to 100 characters", None),
        (json.dumps({"id": "a" * 101}), "1 to 100 characters", None),
        ('{"id": "a"}', "path is missing", None),
        ('{"id": "a", "path": "/v1/nothing", "body": {}}', "must be one of", "not_found"),
        (json.dumps({"id": "a", "path": CHAT}), "body is missing", None),
        (json.dumps({"id": "a", "path": CHAT, "body": []}), "body must be an object", None),
        (json.dumps({"id": "a", "path": CHAT, "body": {}}), "messages", None),
        (json.dumps({"id": "a", "path": "/v1/embeddings", "body": {}}), "input is missing", None),
    ],
)
def test_an_invalid_message_gets_an_error_and_the_socket_stays_open(
    serve, message: str, error: str, code: str | None
) -> None:
    with open_websocket(serve()) as socket:
        socket.send(message)
        answer = json.loads(socket.recv(timeout=60))
        assert error in answer["error"]["message"]
        assert code is None or answer["error"]["code"] == code
        send_request(socket, "good", stream=True)
        assert joined_text(receive_answers(socket, "good")["good"]) == "hello"


def test_an_error_of_another_field_has_the_id(serve: Callable[..., Served]) -> None:
    with open_websocket(serve()) as socket:
        for field in ({"path": 5}, {"body": "x", "path": CHAT}, {"cancel": 1}):
            socket.send(json.dumps({"id": "a", **field}))
            answer = json.loads(socket.recv(timeout=60))
            assert (answer["id"], answer["error"]["param"]) == ("a", next(iter(field)))


def test_a_used_id_and_too_many_requests_are_refused(
    serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    from llmcli.serve.http.routes import websocket as route

    monkeypatch.setattr(route, "MAX_REQUESTS", 2)
    with open_websocket(serve(b"x" * 200)) as socket:
        for name in ("a", "a", "b", "c"):
            send_request(socket, name)
        refused: dict[str, Any] = {}
        while len(refused) < 2:
            message = json.loads(socket.recv(timeout=60))
            if "error" in message:
                refused[message["id"]] = message["error"]
    assert refused["a"]["code"] == "id_in_use"
    assert refused["c"]["code"] == "busy" and "at most 2" in refused["c"]["message"]


def test_closing_a_socket_cancels_its_requests(serve: Callable[..., Served]) -> None:
    served = serve(b"x" * 400)
    with open_websocket(served) as socket:
        for name in ("a", "b"):
            send_request(socket, name, stream=True)
        json.loads(socket.recv(timeout=60))
    with open_websocket(
        served
    ) as socket:  # the first socket's answers have ended or are cancelled first
        send_request(socket, "c", stream=True)
        assert joined_text(receive_answers(socket, "c")["c"]) == "x" * 400
    assert served.bridge.n_open == 0


def test_running_requests_finish_before_the_server_stops(serve: Callable[..., Served]) -> None:
    served = serve(b"x" * 300)
    with open_websocket(served) as socket:
        send_request(socket, "a", stream=True)
        first = json.loads(socket.recv(timeout=60))
        served.server.should_exit = True
        found = receive_answers(socket, "a")["a"]
        assert joined_text([first, *found]) == "x" * 300 and found[-1] == {"done": True}
        with pytest.raises(ConnectionClosed) as closed:
            socket.recv(timeout=60)
    assert closed.value.rcvd.code == 1012  # the service restarts


def test_a_socket_needs_the_key_and_an_allowed_origin(serve: Callable[..., Served]) -> None:
    served = serve(keys=("secret-key-1",), cors=("https://good.example",))
    good = {"additional_headers": {"Authorization": "Bearer secret-key-1"}}
    for more in ({}, {**good, "origin": "https://evil.example"}):
        with (
            pytest.raises((InvalidStatus, ConnectionClosed)),
            open_websocket(served, **more) as socket,
        ):
            socket.recv(timeout=60)
    for origin in (None, "https://good.example", served.url):
        with open_websocket(served, origin=origin, **good) as socket:
            send_request(socket, "a", stream=True)
            assert joined_text(receive_answers(socket, "a")["a"]) == "hello"


def test_a_message_larger_than_the_limit_closes_the_socket(serve: Callable[..., Served]) -> None:
    with open_websocket(serve(max_body=2048)) as socket:
        socket.send(
            json.dumps({"id": "a", "path": CHAT, "body": {"messages": [{"content": "x" * 4096}]}})
        )
        with pytest.raises(ConnectionClosed) as closed:
            socket.recv(timeout=60)
    assert closed.value.rcvd.code == 1009


def test_a_binary_message_closes_the_socket(serve: Callable[..., Served]) -> None:
    with open_websocket(serve()) as socket:
        socket.send(b"\x00")
        with pytest.raises(ConnectionClosed):
            socket.recv(timeout=60)


def test_a_bug_in_one_request_does_not_close_the_socket(
    serve: Callable[..., Served], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    served = serve()
    with open_websocket(served) as socket:
        with monkeypatch.context() as patch:
            patch.setattr("llmcli.api.forms.conversation_form.to_conversation", lambda *_: 1 // 0)
            send_request(socket, "broken")
            (message,) = receive_answers(socket, "broken")["broken"]
        assert message["error"]["message"] == "internal error; see the server's log"
        assert "ZeroDivisionError" in caplog.text
        send_request(socket, "next")
        assert receive_answers(socket, "next")["next"][-1] == {"done": True}


class FakeSocket:
    """A socket whose messages are put into queues."""

    def __init__(self) -> None:
        self.received: asyncio.Queue[Any] = asyncio.Queue()
        self.sent: asyncio.Queue[Any] = asyncio.Queue()

    async def receive(self) -> Any:
        return await self.received.get()

    async def send_text(self, text: str) -> None:
        self.sent.put_nowait(json.loads(text))

    def put(self, **message: Any) -> None:
        self.received.put_nowait({"text": json.dumps(message)})


def test_ending_a_thought_delays_no_other_message(caplog: pytest.LogCaptureFixture) -> None:
    may_end, has_bug = asyncio.Event(), False

    async def ask(path: str, body: Any) -> Any:
        yield {"id": "response-1"}
        if body.get("waits"):
            await asyncio.Event().wait()

    async def end_thinking(response_id: str) -> bool:
        if has_bug:
            raise ZeroDivisionError
        await may_end.wait()
        return True

    async def scenario() -> None:
        nonlocal has_bug
        socket: Any = FakeSocket()
        session = SocketSession(socket, ask, end_thinking, set(), BodyBudget(1 << 20))
        running = asyncio.ensure_future(session.run())
        socket.put(id="a", path=CHAT, body={"waits": True})
        assert (await socket.sent.get())["data"] == {"id": "response-1"}
        socket.put(id="a", action="reasoning_end")
        socket.put(id="b", path=CHAT, body={})
        assert await socket.sent.get() == {"id": "b", "data": {"id": "response-1"}}
        assert await socket.sent.get() == {"id": "b", "done": True}
        may_end.set()
        assert (await socket.sent.get())["control"]["success"] is True
        has_bug = True
        socket.put(id="a", action="reasoning_end")
        assert (await socket.sent.get())["control"]["success"] is False
        assert "ZeroDivisionError" in caplog.text
        has_bug = False
        may_end.clear()
        socket.put(id="a", action="reasoning_end")  # still runs when the socket closes
        socket.received.put_nowait({"type": "websocket.disconnect"})
        await running

    async def limited() -> None:
        async with asyncio.timeout(20):
            await scenario()

    asyncio.run(limited())
