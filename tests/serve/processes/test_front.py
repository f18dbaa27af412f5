"""A request survives its process: it is retried before the first byte, and reported as broken after
it.
"""

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from llmcli.api.errors import ApiError
from llmcli.api.server_settings import ServerSettings
from llmcli.api.stream_resume import MARKS_KEY, POSITION_KEY
from llmcli.serve.http.asgi_documents import AnswerDocuments
from llmcli.serve.processes import front
from llmcli.serve.processes.front import FrontServer, UpstreamLost

PLAIN = {
    "type": "http.response.start",
    "status": 200,
    "headers": [(b"content-type", b"application/json")],
}
START = {
    "type": "http.response.start",
    "status": 200,
    "headers": [(b"content-type", b"text/event-stream")],
}
EVENT = {"type": "http.response.body", "body": b"data: 1\n\n", "more_body": True}
END = {"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False}


class Script:
    """An upstream that plays one list a request; Lost where it says so, a wait where it says None."""

    def __init__(self, *plays: list[Any], why: str = "") -> None:
        self.plays, self.why, self.asked, self.closed = list(plays), why, 0, 0
        self.bodies: list[bytes] = []
        self.known: list[Any] = []

    async def ask(
        self, scope: dict[str, Any], body: bytes, key: bytes
    ) -> AsyncGenerator[Any, None]:
        self.asked += 1
        self.bodies.append(body)
        self.known.append(scope.get(POSITION_KEY))
        try:
            for one in self.plays.pop(0):
                if one is UpstreamLost or isinstance(one, ApiError):
                    raise one
                if one is None:
                    await asyncio.Event().wait()
                yield one
        finally:
            self.closed += 1

    async def wait(self, seconds: float) -> str:
        return self.why

    def stop(self) -> None:
        pass


async def asked(
    app: Any,
    body: bytes = b"{}",
    *,
    leaves: bool = False,
    path: str = "/v1/chat/completions",
    headers: Any = (),
) -> list[Any]:
    """What the application sends for one request; a client that `leaves` does so after the first
    message.
    """
    sent: list[Any] = []
    first = asyncio.Event()
    parts = [
        {"type": "http.request", "body": body[:1], "more_body": True},
        {"type": "http.request", "body": body[1:]},
    ]

    async def receive() -> Any:
        if parts:
            return parts.pop(0)
        await (first.wait() if leaves else asyncio.Event().wait())
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)
        first.set()

    scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "headers": list(headers),
        "query_string": b"",
    }
    await app(scope, receive, send)
    return sent


async def talked(app: Any, body: Any, *, path: str = "/v1/ws", headers: Any = ()) -> list[Any]:
    """What comes over a WebSocket for one request, until it is done."""
    sent: list[Any] = []
    done = asyncio.Event()
    message = json.dumps({"id": "a", "path": "/v1/chat/completions", "body": body})
    parts = [{"type": "websocket.connect"}, {"type": "websocket.receive", "text": message}]

    async def receive() -> Any:
        if parts:
            return parts.pop(0)
        await done.wait()
        return {"type": "websocket.disconnect", "code": 1000}

    async def send(message: Any) -> None:
        sent.append(message)
        text = message.get("text", "")
        if '"done"' in text or '"error":{' in text or message["type"] == "websocket.close":
            done.set()

    await app(
        {"type": "websocket", "path": path, "headers": list(headers), "query_string": b""},
        receive,
        send,
    )
    return sent


def run(upstream: Script, body: bytes = b"{}", **more: Any) -> list[Any]:
    settings = ServerSettings(("tiny",), max_body=100)
    return asyncio.run(asked(FrontServer(upstream, settings), body, **more))


def error(sent: list[Any]) -> tuple[int, Any]:
    return sent[0]["status"], json.loads(sent[1]["body"])["error"]["code"]


def test_lost_before_the_first_byte_is_asked_again() -> None:
    upstream = Script([UpstreamLost], [UpstreamLost], [START, EVENT, END])
    assert run(upstream, b'{"a": 1}') == [START, EVENT, END]
    assert upstream.bodies == [b'{"a": 1}'] * 3


def test_a_page_that_may_ask_may_also_read_why_nobody_answers() -> None:
    page = "https://good.example"
    front = FrontServer(Script(*[[UpstreamLost]] * 3), ServerSettings(("tiny",), cors=(page,)))
    sent = asyncio.run(asked(front, b"{}", headers=[(b"origin", page.encode())]))
    assert error(sent) == (503, "model_unavailable")
    assert dict(sent[0]["headers"])[b"access-control-allow-origin"] == page.encode()


def test_lost_after_it_is_an_event() -> None:
    sent = run(Script([START, EVENT, UpstreamLost], [START, EVENT, END]))
    assert sent[:2] == [START, EVENT]
    assert sent[2]["more_body"] is False
    assert json.loads(sent[2]["body"].removeprefix(b"data: "))["error"]["code"] == "model_lost"


@pytest.mark.parametrize("path", ["/v1/messages", "/messages"])
def test_it_is_an_event_that_anthropics_client_knows(path: str) -> None:
    sent = run(Script([START, EVENT, UpstreamLost]), path=path)
    name, data = sent[-1]["body"].decode().rstrip("\n").split("\n")
    assert (name, sent[-1]["more_body"]) == ("event: error", False)
    told = json.loads(data.removeprefix("data: "))
    assert (told["type"], told["error"]["type"]) == ("error", "overloaded_error")


def test_it_is_a_line_that_ollamas_clients_know() -> None:
    start = {**START, "headers": [(b"content-type", b"application/x-ndjson")]}
    sent = run(Script([start, {**EVENT, "body": b"{}\n"}, UpstreamLost]), path="/api/chat")
    assert json.loads(sent[-1]["body"]).keys() == {"error"}
    assert sent[-1]["more_body"] is False


def telling(message: dict[str, Any], *told: tuple[int, int | None, str | None]) -> dict[str, Any]:
    return {**message, MARKS_KEY: told}


def test_a_stream_goes_on_where_it_stopped() -> None:
    second, third = ({**EVENT, "body": b"data: %d\n\n" % number} for number in (2, 3))
    upstream = Script(
        [telling(START), telling(EVENT, (0, 7, None), (1, None, None), (0, 8, None)), UpstreamLost],
        [telling(START), telling(second, (0, None, "stop"), (1, 9, None)), UpstreamLost],
        [telling(START), telling(third, (1, 10, None)), telling(END)],
    )
    assert run(upstream) == [START, EVENT, second, third, END]
    assert [one["tokens"] for one in upstream.known] == [
        {},
        {0: [7, 8], 1: []},
        {0: [7, 8], 1: [9]},
    ]
    assert [one["ends"] for one in upstream.known] == [{}, {}, {0: "stop"}]
    assert len({(one["name"], one["created"], one["seed"]) for one in upstream.known}) == 1


def test_a_stream_that_nobody_goes_on_with_is_told_as_broken() -> None:
    begun = [telling(START), telling(EVENT, (0, 7, None)), UpstreamLost]
    other = [{**START, "status": 500}, {"type": "http.response.body", "body": b"{}"}]
    for plays in (
        [begun, other, other],
        [begun, [UpstreamLost], [UpstreamLost]],
        [[telling(START), EVENT, UpstreamLost]],
    ):
        sent = run(Script(*plays))
        assert sent[:2] == [START, EVENT]
        assert len(sent) == 3
        assert json.loads(sent[2]["body"].removeprefix(b"data: "))["error"]["code"] == "model_lost"


def test_a_stream_waits_for_those_who_have_too_much_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front, "BUSY_PAUSE_SECONDS", 0.001)
    begun = [telling(START), telling(EVENT, (0, 7, None)), UpstreamLost]
    full = [{**START, "status": 429}, {"type": "http.response.body", "body": b"{}"}]
    busy = [ApiError("as many requests wait as may wait", 429, code="busy")]  # as replicas say it
    assert run(Script(begun, full, busy, full, busy, [telling(START), telling(END)])) == [
        START,
        EVENT,
        END,
    ]
    monkeypatch.setattr(front, "RESTART_WAIT_SECONDS", 0.002)
    assert run(Script(begun, full, busy))[-1]["body"].startswith(b'data: {"error"')
    assert error(run(Script(busy))) == (429, "busy")  # who has not begun is told at once


def test_a_stream_that_was_over_stays_so() -> None:
    upstream = Script(
        [telling(START), telling(END, (0, 7, None)), UpstreamLost], [telling(START), telling(END)]
    )
    assert run(upstream) == [START, END]
    assert upstream.asked == 1


def test_nobody_goes_on_with_a_stream_while_it_stops() -> None:
    async def stopped() -> list[Any]:
        made = FrontServer(upstream, ServerSettings(("tiny",)))
        task = asyncio.create_task(asked(made))
        while not upstream.waits:
            await asyncio.sleep(0)
        made.stop()
        return await task

    class Stopped(Script):
        waits, stopped = False, asyncio.Event()

        async def ask(
            self, scope: dict[str, Any], body: bytes, key: bytes
        ) -> AsyncGenerator[Any, None]:
            self.asked += 1
            for message in (telling(START), telling(EVENT, (0, 7, None))):
                yield message
            self.waits = True
            await self.stopped.wait()
            raise UpstreamLost

        def stop(self) -> None:
            self.stopped.set()

    upstream = Stopped()
    sent = asyncio.run(stopped())
    assert upstream.asked == 1
    assert b"model_lost" in sent[-1]["body"]


def test_a_document_that_was_begun_stays_short() -> None:
    start = {
        **START,
        "headers": [(b"content-type", b"application/json"), (b"content-length", b"99")],
    }
    assert run(Script([start, UpstreamLost])) == [start]


def test_what_loses_every_model_is_not_asked_for_ever() -> None:
    upstream = Script(*[[UpstreamLost]] * 9)
    sent = run(upstream)
    assert error(sent) == (503, "model_unavailable")
    assert dict(sent[0]["headers"])[b"retry-after"]
    assert upstream.asked == front.MAX_TRIES


def test_nobody_there_says_why() -> None:
    upstream = Script(why="no worker at a:1")
    sent = run(upstream)
    assert error(sent) == (503, "model_unavailable")
    assert b"no worker at a:1" in sent[1]["body"]
    assert not upstream.asked


def test_a_body_that_is_too_large() -> None:
    upstream = Script([START, END])
    assert run(upstream, bytes(101))[0]["status"] == 413
    assert not upstream.asked


def test_a_client_that_leaves_ends_the_work() -> None:
    upstream = Script([START, None])
    assert run(upstream, leaves=True) == [START]
    assert upstream.closed == 1


def over_socket(upstream: Script, body: Any, **more: Any) -> list[Any]:
    """What a WebSocket is told whose upstream has none; each message without the id of its request."""
    settings, headers = (
        ServerSettings(("tiny",), keys=more.pop("keys", ())),
        more.pop("headers", []),
    )
    sent = asyncio.run(talked(FrontServer(upstream, settings), body, headers=headers, **more))
    texts = [json.loads(one["text"]) for one in sent if one["type"] == "websocket.send"]
    assert all(one.pop("id") == "a" for one in texts)
    return [one["type"] for one in sent if one["type"] != "websocket.send"] + texts


def test_a_socket_goes_on_request_by_request() -> None:
    said = {**START, "headers": [(b"content-type", b"text/event-stream; charset=utf-8")]}
    half = {
        "type": "http.response.body",
        "body": b': still here\n\ndata: {"n": 1}\n\nda',
        "more_body": True,
    }
    rest = {
        "type": "http.response.body",
        "body": b'ta: {"n": 2}\n\ndata: [DONE]\n\n',
        "more_body": False,
    }
    upstream = Script([UpstreamLost], [said, half, rest])
    told = over_socket(upstream, {"stream": True})
    assert told == ["websocket.accept", {"data": {"n": 1}}, {"data": {"n": 2}}, {"done": True}]
    assert json.loads(upstream.bodies[0]) == {"stream": True}
    start = {**START, "headers": [(b"content-type", b"application/json")]}
    whole = {"type": "http.response.body", "body": b'{"n": 3, "error": null}', "more_body": False}
    assert over_socket(Script([start, whole]), {})[1:] == [
        {"data": {"n": 3, "error": None}},
        {"done": True},
    ]


def test_a_socket_outlives_a_model() -> None:
    first = {"type": "http.response.body", "body": b'data: {"n": 1}\n\n', "more_body": True}
    second = {**first, "body": b'data: {"n": 2}\n\ndata: [DONE]\n\n', "more_body": False}
    upstream = Script(
        [telling(START), telling(first, (0, 7, None)), UpstreamLost],
        [telling(START), telling(second)],
    )
    assert over_socket(upstream, {"stream": True})[1:] == [
        {"data": {"n": 1}},
        {"data": {"n": 2}},
        {"done": True},
    ]
    assert upstream.known[1]["tokens"] == {0: [7]}


def test_a_socket_is_told_what_went_wrong() -> None:
    start = {**START, "status": 400, "headers": [(b"content-type", b"application/json")]}
    raw = b'{"error": {"message": "no", "type": "invalid_request_error", "param": "n", "code": null, "n_ctx": 5}}'
    (_, told) = over_socket(
        Script([start, {"type": "http.response.body", "body": raw, "more_body": False}]), {}
    )
    assert told["error"] == json.loads(raw)["error"]
    for play in (
        [START, UpstreamLost],
        [{**START, "headers": [(b"content-type", b"application/json")]}, UpstreamLost],
    ):
        (_, told) = over_socket(Script(play), {})
        assert told["error"]["code"] == "model_lost"
    (_, told) = over_socket(Script(*[[UpstreamLost]] * 9), {})
    assert told["error"]["code"] == "model_unavailable"


def test_a_socket_needs_its_path_its_key_and_a_page_of_ours() -> None:
    for more in (
        {"path": "/elsewhere"},
        {"keys": ("secret-key-1",)},
        {"headers": [(b"origin", b"https://evil.example")]},
        {"headers": [(b"host", b"evil.example")]},
    ):
        upstream = Script([START, END])
        assert over_socket(upstream, {}, **more) == ["websocket.close"]
        assert not upstream.asked
    key = [(b"authorization", b"Bearer secret-key-1")]
    assert (
        over_socket(Script([START, END]), {}, keys=("secret-key-1",), headers=key)[0]
        == "websocket.accept"
    )


def test_nothing_is_begun_while_it_stops() -> None:
    async def stopping() -> list[Any]:
        made = FrontServer(Script([START, END]), ServerSettings(("tiny",)))
        await made.drain(1)
        return await asked(made)

    assert asyncio.run(stopping())[0]["status"] == 503


def test_what_is_brought_without_a_key_is_not_read() -> None:
    upstream = Script([START, END])
    settings = ServerSettings(("tiny",), max_body=100, keys=("secret-key-1",))
    asyncio.run(asked(FrontServer(upstream, settings), b"x" * 1000))
    assert upstream.bodies == [b""]  # the application says 401 to it


def test_a_whole_answer_that_is_a_list_is_one_document() -> None:
    async def scene() -> None:
        read = AnswerDocuments()
        await read.send(PLAIN)
        await read.send({"type": "http.response.body", "body": b'[{"index": 0}, {"index": 1}]'})
        read.raise_error()
        assert read.queue.get_nowait() == [{"index": 0}, {"index": 1}]

    asyncio.run(scene())
