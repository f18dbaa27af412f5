"""`/v1/chat/completions/control` ends the thinking of a running answer."""

import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import httpx2 as httpx
import pytest
from websockets.sync.client import connect

from tests.fixtures.fakes import EOS
from tests.fixtures.server import Served

PATH = "/v1/chat/completions/control"
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant><think>\n{% endif %}"
)
REQUESTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4000},
}


def release_at_end(served: Served, released: threading.Event, monkeypatch: Any) -> None:
    """Let the model think on when its thinking is about to be ended."""
    end_thinking = served.bridge.end_thinking

    async def release_and_end(name: str, client: str) -> bool | None:
        released.set()
        return await end_thinking(name, client)

    monkeypatch.setattr(served.bridge, "end_thinking", release_and_end)


def endless_thought(released: threading.Event) -> Callable[[list[int]], int]:
    """Return a model that thinks 30 different bytes, waits until `released`, thinks on, and says
    "yes" when its thinking is ended.
    """

    def speak(tokens: list[int]) -> int:
        text = bytes(token for token in tokens if token < 256)
        said = text.rpartition(b"<think>\n")[2]
        thinking, has_ended, reply = said.partition(b"</think>")
        if has_ended:
            return [*b"yes", EOS][len(reply.lstrip())]
        if len(thinking) == 30:
            assert released.wait(60)
        return 97 + len(thinking) * 7 % 26

    return speak


def stream(served: Served, path: str, headers: dict[str, str]) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects of a stream."""
    body = {**REQUESTS[path], "stream": True, "endless": True}
    with httpx.stream(
        "POST", served.url + path, json=body, headers=headers, timeout=60
    ) as response:
        assert response.status_code == 200, response.read()
        for line in response.iter_lines():
            data = line.removeprefix("data: ")
            if data.startswith("{"):
                yield json.loads(data)


def response_id(chunk: dict[str, Any]) -> str | None:
    """Return the id of the response in a chunk of any API, if it has one."""
    inner = chunk.get("response") or chunk.get("message") or chunk
    found = inner.get("id")
    return str(found) if found else None


@pytest.mark.parametrize("path", REQUESTS)
def test_the_reply_follows_when_the_thinking_is_ended(
    serve: Callable[..., Served], monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    released = threading.Event()
    served = serve(endless_thought(released), template=TEMPLATE, n_ctx=4096, keys=("one", "two"))
    end_thinking = served.bridge.end_thinking

    async def release_and_end(name: str, client: str) -> bool | None:
        if client == "one":
            released.set()
        return await end_thinking(name, client)

    monkeypatch.setattr(served.bridge, "end_thinking", release_and_end)
    own, other = ({"authorization": f"Bearer {key}"} for key in ("one", "two"))

    def end(name: str, headers: dict[str, str]) -> httpx.Response:
        body = {"id": name, "action": "reasoning_end"}
        return httpx.post(served.url + PATH, json=body, headers=headers, timeout=60)

    found, text = "", ""
    for chunk in stream(served, path, own):
        name = response_id(chunk)
        if not found and name:
            found = name
            assert end(found, {}).status_code == 401
            assert end(found, other).status_code == 404
            answer = end(found, own)
            assert (answer.status_code, answer.json()["success"]) == (200, True)
        text += json.dumps(chunk)
    assert "yes" in text or '"y"' in text
    assert end(found, own).status_code == 404  # the answer has ended


@pytest.mark.parametrize("path", REQUESTS)
@pytest.mark.parametrize("is_early", [False, True])
def test_a_message_on_the_socket_ends_the_thinking(
    serve: Callable[..., Served], monkeypatch: pytest.MonkeyPatch, path: str, is_early: bool
) -> None:
    released = threading.Event()
    served = serve(endless_thought(released), template=TEMPLATE, n_ctx=4096)
    release_at_end(served, released, monkeypatch)
    end = json.dumps({"id": "a", "action": "reasoning_end"})
    with connect(f"{served.v1.replace('http', 'ws', 1)}/ws") as socket:
        socket.send(end)  # no such request
        unknown = json.loads(socket.recv(timeout=60))
        assert unknown["control"] == {"action": "reasoning_end", "success": False}
        body = {**REQUESTS[path], "stream": True, "endless": True}
        socket.send(json.dumps({"id": "a", "path": path, "body": body}))
        messages: list[dict[str, Any]] = []
        if is_early:  # it is kept until the answer has an id
            socket.send(end)
        while not messages or "done" not in messages[-1]:
            messages.append(json.loads(socket.recv(timeout=60)))
            assert "error" not in messages[-1]
            if len(messages) == 1 and not is_early:
                socket.send(end)
    controls = [message["control"] for message in messages if "control" in message]
    assert controls == [{"action": "reasoning_end", "success": True}]
    text = json.dumps(messages)
    assert "yes" in text or '"y"' in text


def test_an_answer_without_an_id_cannot_be_changed(serve: Callable[..., Served]) -> None:
    with connect(f"{serve(b'hello').v1.replace('http', 'ws', 1)}/ws") as socket:
        body = {"messages": REQUESTS["/v1/chat/completions"]["messages"], "model": "tiny"}
        socket.send(json.dumps({"id": "a", "path": "/api/chat", "body": body}))
        socket.send(json.dumps({"id": "a", "action": "reasoning_end"}))
        messages = [json.loads(socket.recv(timeout=60))]
        while "control" not in messages[-1]:
            messages.append(json.loads(socket.recv(timeout=60)))
        assert messages[-1]["control"]["success"] is False


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"id": "chatcmpl-0", "action": "reasoning_end"}, 404),
        ({"id": "chatcmpl-0", "action": "stop"}, 400),
        ({"action": "reasoning_end"}, 400),
        ({"id": 5, "action": "reasoning_end"}, 400),
    ],
)
def test_wrong_requests(serve: Callable[..., Served], body: dict[str, Any], status: int) -> None:
    answer = httpx.post(serve().url + PATH, json=body)
    assert answer.status_code == status
    assert answer.json()["error"]["param"]
