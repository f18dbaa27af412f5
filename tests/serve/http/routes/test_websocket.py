"""The WebSocket gives the same answers as HTTP, several at once, cancelled one by one."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from tests.api.forms.test_openai_chat import HELLO, client
from tests.fixtures.server import Served

CHAT = "/v1/chat/completions"


@contextmanager
def opened(served: Served, **more: Any) -> Iterator[ClientConnection]:
    address = f"{served.v1.replace('http', 'ws', 1)}/ws"
    with connect(
        address, max_queue=None, **more
    ) as socket:  # whoever does not read cannot close in time
        yield socket


def ask(socket: ClientConnection, name: str, path: str = CHAT, **body: Any) -> None:
    given = {"messages": HELLO, **body} if path == CHAT else body
    socket.send(json.dumps({"id": name, "path": path, "body": given}))


def until_over(socket: ClientConnection, *names: str) -> dict[str, list[dict[str, Any]]]:
    """What came with each id, until each is over."""
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    over: set[str] = set()
    while over != set(names):
        message = json.loads(socket.recv(timeout=60))
        found[message.pop("id")].append(message)
        over |= {
            name for name, those in found.items() if those and those[-1].keys() & {"done", "error"}
        }
    return found


def text(messages: list[dict[str, Any]]) -> str:
    choices = [choice for one in messages if "data" in one for choice in one["data"]["choices"]]
    return "".join(choice["delta"].get("content") or "" for choice in choices)


def test_it_says_what_http_says_whole_and_in_chunks(tiny: Served) -> None:
    with client(tiny) as asked:
        whole = asked.chat.completions.create(model="tiny", messages=HELLO, max_tokens=12)
        vector = asked.embeddings.create(model="tiny", input="a cat", encoding_format="float")
    with opened(tiny) as socket:
        ask(socket, "a", max_tokens=12, stream=True)
        ask(socket, "b", max_tokens=12)
        ask(socket, "c", "/v1/embeddings", input="a cat")
        found = until_over(socket, "a", "b", "c")
    assert text(found["a"]) == whole.choices[0].message.content
    assert found["a"][-2]["data"]["choices"][0]["finish_reason"] == "length"
    assert found["a"][-1] == {"done": True}
    assert [set(one) for one in found["b"]] == [{"data"}, {"done"}]
    assert (
        found["b"][0]["data"]["choices"][0]["message"]["content"]
        == whole.choices[0].message.content
    )
    assert found["c"][0]["data"]["data"][0]["embedding"] == pytest.approx(
        vector.data[0].embedding, abs=1e-3
    )


def test_one_is_cancelled_and_the_others_go_on(serve: Callable[..., Served]) -> None:
    served = serve(b"x" * 400)
    with opened(served) as socket:
        ask(socket, "long", stream=True)
        first = json.loads(socket.recv(timeout=60))
        assert first["id"] == "long"
        ask(socket, "short", stream=True, max_tokens=5)
        socket.send(json.dumps({"id": "long", "cancel": True}))
        socket.send(
            json.dumps({"id": "nobody", "cancel": True})
        )  # has ended already, for all we know
        found = until_over(socket, "long", "short")
        assert found["long"][-1] in ({"done": True, "cancelled": True}, {"done": True})
        assert text(found["short"]) == "xxxxx"
        ask(socket, "never", stream=True)
        socket.send(json.dumps({"id": "never", "cancel": True}))  # perhaps before it has begun
        assert until_over(socket, "never")["never"][-1]["done"]
        ask(socket, "long", stream=True, max_tokens=1)  # an id that is over may come again
        assert text(until_over(socket, "long")["long"]) == "x"


@pytest.mark.parametrize(
    ("message", "told", "code"),
    [
        ("nonsense", "not JSON", None),
        ("[]", "must be a JSON object", None),
        ("{}", "id is missing", None),
        ('{"id": 5}', "id must be text", None),
        ('{"id": ""}', "1 to 100 characters", None),
        ('{"id": "a"}', "path is missing", None),
        ('{"id": "a", "path": "/v1/nothing", "body": {}}', "must be one of", "not_found"),
        (json.dumps({"id": "a", "path": CHAT}), "body is missing", None),
        (json.dumps({"id": "a", "path": CHAT, "body": []}), "body must be an object", None),
        (
            json.dumps({"id": "a", "path": CHAT, "body": {"messages": HELLO, "model": "b"}}),
            "not served",
            "model_not_found",
        ),
        (json.dumps({"id": "a", "path": CHAT, "body": {}}), "messages", None),
        (json.dumps({"id": "a", "path": "/v1/embeddings", "body": {}}), "input is missing", None),
    ],
)
def test_what_is_wrong_is_told_and_the_socket_stays(
    serve, message: str, told: str, code: str | None
) -> None:
    with opened(serve()) as socket:
        socket.send(message)
        answer = json.loads(socket.recv(timeout=60))
        assert told in answer["error"]["message"]
        assert code is None or answer["error"]["code"] == code
        ask(socket, "good", stream=True)
        assert text(until_over(socket, "good")["good"]) == "hello"


def test_an_id_in_use_and_too_many_at_once_are_refused(
    serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    from llmcli.serve.http.routes import websocket as route

    monkeypatch.setattr(route, "MAX_REQUESTS", 2)
    with opened(serve(b"x" * 200)) as socket:
        for name in ("a", "a", "b", "c"):
            ask(socket, name)
        refused: dict[str, Any] = {}
        while len(refused) < 2:
            message = json.loads(socket.recv(timeout=60))
            if "error" in message:
                refused[message["id"]] = message["error"]
    assert refused["a"]["code"] == "id_in_use"
    assert refused["c"]["code"] == "busy" and "at most 2" in refused["c"]["message"]


def test_a_socket_that_closes_ends_what_it_asked_for(serve: Callable[..., Served]) -> None:
    served = serve(b"x" * 400)
    with opened(served) as socket:
        for name in ("a", "b"):
            ask(socket, name, stream=True)
        json.loads(socket.recv(timeout=60))
    with opened(
        served
    ) as socket:  # what is left of the first is dropped before this one is answered, or has ended
        ask(socket, "c", stream=True)
        assert text(until_over(socket, "c")["c"]) == "x" * 400
    assert served.bridge.n_open == 0


def test_what_is_under_way_is_told_before_the_server_ends(serve: Callable[..., Served]) -> None:
    served = serve(b"x" * 300)
    with opened(served) as socket:
        ask(socket, "a", stream=True)
        first = json.loads(socket.recv(timeout=60))
        served.server.should_exit = True
        found = until_over(socket, "a")["a"]
        assert text([first, *found]) == "x" * 300 and found[-1] == {"done": True}
        with pytest.raises(ConnectionClosed) as closed:
            socket.recv(timeout=60)
    assert closed.value.rcvd.code == 1012  # the service restarts


def test_a_key_is_needed_and_a_strange_page_is_not_let_in(serve: Callable[..., Served]) -> None:
    served = serve(keys=("secret-key-1",), cors=("https://good.example",))
    good = {"additional_headers": {"Authorization": "Bearer secret-key-1"}}
    for more in ({}, {**good, "origin": "https://evil.example"}):
        with pytest.raises((InvalidStatus, ConnectionClosed)), opened(served, **more) as socket:
            socket.recv(timeout=60)
    for origin in (None, "https://good.example", served.url):
        with opened(served, origin=origin, **good) as socket:
            ask(socket, "a", stream=True)
            assert text(until_over(socket, "a")["a"]) == "hello"


def test_a_message_beyond_the_limit_closes_the_socket(serve: Callable[..., Served]) -> None:
    with opened(serve(max_body=2048)) as socket:
        socket.send(
            json.dumps({"id": "a", "path": CHAT, "body": {"messages": [{"content": "x" * 4096}]}})
        )
        with pytest.raises(ConnectionClosed) as closed:
            socket.recv(timeout=60)
    assert closed.value.rcvd.code == 1009


def test_bytes_close_the_socket(serve: Callable[..., Served]) -> None:
    with opened(serve()) as socket:
        socket.send(b"\x00")
        with pytest.raises(ConnectionClosed):
            socket.recv(timeout=60)
