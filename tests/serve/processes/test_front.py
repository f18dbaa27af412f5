"""The front server retries a request whose process is lost before the first byte, and reports it as
broken afterwards.
"""

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from llmcli.api.errors import ApiError
from llmcli.api.server_settings import ServerSettings
from llmcli.api.stream_resume import MARKS_KEY, POSITION_KEY
from llmcli.serve.grpc.answers import FrontAnswers, GrpcClient
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
    """An upstream that plays a list of messages for each request. UpstreamLost and ApiError in a
    list are raised; None waits until the request is cancelled.
    """

    def __init__(self, *plays: list[Any], reason: str = "") -> None:
        self.plays, self.reason, self.n_requests, self.closed = list(plays), reason, 0, 0
        self.bodies: list[bytes] = []
        self.positions: list[Any] = []

    async def ask(
        self, scope: dict[str, Any], body: bytes, key: bytes
    ) -> AsyncGenerator[Any, None]:
        self.n_requests += 1
        self.bodies.append(body)
        self.positions.append(scope.get(POSITION_KEY))
        try:
            for item in self.plays.pop(0):
                if item is UpstreamLost or isinstance(item, ApiError):
                    raise item
                if item is None:
                    await asyncio.Event().wait()
                yield item
        finally:
            self.closed += 1

    async def wait(self, seconds: float) -> str:
        return self.reason

    def stop(self) -> None:
        pass


async def run_request(
    app: Any,
    body: bytes = b"{}",
    *,
    disconnects: bool = False,
    path: str = "/v1/chat/completions",
    headers: Any = (),
) -> list[Any]:
    """Return the ASGI messages that the application sends for one request. With `leaves`, the
    client disconnects after the first message.
    """
    sent: list[Any] = []
    first = asyncio.Event()
    unread_messages = [
        {"type": "http.request", "body": body[:1], "more_body": True},
        {"type": "http.request", "body": body[1:]},
    ]

    async def receive() -> Any:
        if unread_messages:
            return unread_messages.pop(0)
        await (first.wait() if disconnects else asyncio.Event().wait())
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            names = [name for name, _ in message["headers"]]
            assert names.count(b"x-request-id") == 1
            other = [header for header in message["headers"] if header[0] != b"x-request-id"]
            message = {**message, "headers": other}
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


async def run_websocket(
    app: Any, body: Any, *, path: str = "/v1/ws", headers: Any = ()
) -> list[Any]:
    """Return the ASGI messages that the application sends for one request over a WebSocket, until
    it is done.
    """
    sent: list[Any] = []
    done = asyncio.Event()
    message = json.dumps({"id": "a", "path": "/v1/chat/completions", "body": body})
    unread_messages = [
        {"type": "websocket.connect"},
        {"type": "websocket.receive", "text": message},
    ]

    async def receive() -> Any:
        if unread_messages:
            return unread_messages.pop(0)
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
    return asyncio.run(run_request(FrontServer(upstream, settings), body, **more))


def error(sent: list[Any]) -> tuple[int, Any]:
    return sent[0]["status"], json.loads(sent[1]["body"])["error"]["code"]


def test_a_request_lost_before_the_first_byte_is_sent_again() -> None:
    upstream = Script([UpstreamLost], [UpstreamLost], [START, EVENT, END])
    assert run(upstream, b'{"a": 1}') == [START, EVENT, END]
    assert upstream.bodies == [b'{"a": 1}'] * 3


def test_an_allowed_origin_can_read_the_error() -> None:
    page = "https://good.example"
    upstream = Script(*[[UpstreamLost]] * front.MAX_TRIES)
    server = FrontServer(upstream, ServerSettings(("tiny",), cors=(page,)))
    sent = asyncio.run(run_request(server, b"{}", headers=[(b"origin", page.encode())]))
    assert error(sent) == (503, "model_unavailable")
    assert dict(sent[0]["headers"])[b"access-control-allow-origin"] == page.encode()


def test_a_stream_that_is_lost_ends_with_an_error_event() -> None:
    sent = run(Script([START, EVENT, UpstreamLost], [START, EVENT, END]))
    assert sent[:2] == [START, EVENT]
    assert sent[2]["more_body"] is False
    assert json.loads(sent[2]["body"].removeprefix(b"data: "))["error"]["code"] == "model_lost"


@pytest.mark.parametrize("path", ["/v1/messages", "/messages"])
def test_the_error_event_has_anthropics_format(path: str) -> None:
    sent = run(Script([START, EVENT, UpstreamLost]), path=path)
    name, data = sent[-1]["body"].decode().rstrip("\n").split("\n")
    assert (name, sent[-1]["more_body"]) == ("event: error", False)
    event = json.loads(data.removeprefix("data: "))
    assert (event["type"], event["error"]["type"]) == ("error", "overloaded_error")


def test_the_error_event_has_ollamas_format() -> None:
    start = {**START, "headers": [(b"content-type", b"application/x-ndjson")]}
    sent = run(Script([start, {**EVENT, "body": b"{}\n"}, UpstreamLost]), path="/api/chat")
    assert json.loads(sent[-1]["body"]).keys() == {"error"}
    assert sent[-1]["more_body"] is False


def with_marks(
    message: dict[str, Any], *marks: tuple[int, int | None, str | None]
) -> dict[str, Any]:
    return {**message, MARKS_KEY: marks}


def test_a_stream_is_resumed_where_it_stopped() -> None:
    second, third = ({**EVENT, "body": b"data: %d\n\n" % number} for number in (2, 3))
    upstream = Script(
        [
            with_marks(START),
            with_marks(EVENT, (0, 7, None), (1, None, None), (0, 8, None)),
            UpstreamLost,
        ],
        [with_marks(START), with_marks(second, (0, None, "stop"), (1, 9, None)), UpstreamLost],
        [with_marks(START), with_marks(third, (1, 10, None)), with_marks(END)],
    )
    assert run(upstream) == [START, EVENT, second, third, END]
    assert [item["tokens"] for item in upstream.positions] == [
        {},
        {0: [7, 8], 1: []},
        {0: [7, 8], 1: [9]},
    ]
    assert [item["ends"] for item in upstream.positions] == [{}, {}, {0: "stop"}]
    assert len({(item["name"], item["created"], item["seed"]) for item in upstream.positions}) == 1


def test_a_stream_that_cannot_be_resumed_ends_with_an_error() -> None:
    interrupted = [with_marks(START), with_marks(EVENT, (0, 7, None)), UpstreamLost]
    failed = [{**START, "status": 500}, {"type": "http.response.body", "body": b"{}"}]
    for plays in (
        [interrupted, *[failed] * (front.MAX_TRIES - 1)],
        [interrupted, *[[UpstreamLost]] * (front.MAX_TRIES - 1)],
        [[with_marks(START), EVENT, UpstreamLost]],
    ):
        sent = run(Script(*plays))
        assert sent[:2] == [START, EVENT]
        assert len(sent) == 3
        assert json.loads(sent[2]["body"].removeprefix(b"data: "))["error"]["code"] == "model_lost"


def test_an_interrupted_stream_waits_for_busy_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front, "BUSY_PAUSE_SECONDS", 0.001)
    interrupted = [with_marks(START), with_marks(EVENT, (0, 7, None)), UpstreamLost]
    busy_response = [{**START, "status": 429}, {"type": "http.response.body", "body": b"{}"}]
    busy = [ApiError("the queue is full", 429, code="busy")]  # raised by replicas
    assert run(
        Script(
            interrupted,
            busy_response,
            busy,
            busy_response,
            busy,
            [with_marks(START), with_marks(END)],
        )
    ) == [
        START,
        EVENT,
        END,
    ]
    monkeypatch.setattr(front, "RESTART_WAIT_SECONDS", 0.002)
    assert run(Script(interrupted, busy_response, busy))[-1]["body"].startswith(b'data: {"error"')
    assert error(run(Script(busy))) == (429, "busy")  # a new request does not wait


def test_a_complete_stream_is_not_resumed() -> None:
    upstream = Script(
        [with_marks(START), with_marks(END, (0, 7, None)), UpstreamLost],
        [with_marks(START), with_marks(END)],
    )
    assert run(upstream) == [START, END]
    assert upstream.n_requests == 1


def test_no_stream_is_resumed_while_the_server_stops() -> None:
    async def stopped() -> list[Any]:
        server = FrontServer(upstream, ServerSettings(("tiny",)))
        task = asyncio.create_task(run_request(server))
        while not upstream.waits:
            await asyncio.sleep(0)
        server.stop()
        return await task

    class StoppedScript(Script):
        waits, stopped = False, asyncio.Event()

        async def ask(
            self, scope: dict[str, Any], body: bytes, key: bytes
        ) -> AsyncGenerator[Any, None]:
            self.n_requests += 1
            for message in (with_marks(START), with_marks(EVENT, (0, 7, None))):
                yield message
            self.waits = True
            await self.stopped.wait()
            raise UpstreamLost

        def stop(self) -> None:
            self.stopped.set()

    upstream = StoppedScript()
    sent = asyncio.run(stopped())
    assert upstream.n_requests == 1
    assert b"model_lost" in sent[-1]["body"]


def test_a_lost_response_that_is_not_a_stream_stays_incomplete() -> None:
    start = {
        **START,
        "headers": [(b"content-type", b"application/json"), (b"content-length", b"99")],
    }
    assert run(Script([start, UpstreamLost])) == [start]


def test_the_number_of_tries_is_limited() -> None:
    upstream = Script(*[[UpstreamLost]] * (front.MAX_TRIES + 1))
    sent = run(upstream)
    assert error(sent) == (503, "model_unavailable")
    assert dict(sent[0]["headers"])[b"retry-after"]
    assert upstream.n_requests == front.MAX_TRIES


def test_an_unavailable_model_is_reported_with_the_reason() -> None:
    upstream = Script(reason="no worker at a:1")
    sent = run(upstream)
    assert error(sent) == (503, "model_unavailable")
    assert b"no worker at a:1" in sent[1]["body"]
    assert not upstream.n_requests


def test_a_body_that_is_too_large_is_refused() -> None:
    upstream = Script([START, END])
    assert run(upstream, bytes(101))[0]["status"] == 413
    assert not upstream.n_requests


def test_a_disconnect_cancels_the_request() -> None:
    upstream = Script([START, None])
    assert run(upstream, disconnects=True) == [START]
    assert upstream.closed == 1


def websocket_messages(upstream: Script, body: Any, **more: Any) -> list[Any]:
    """Return what a front server sends over a WebSocket: the types of its ASGI messages except
    websocket.send, then the JSON messages without their id.
    """
    settings, headers = (
        ServerSettings(("tiny",), keys=more.pop("keys", ())),
        more.pop("headers", []),
    )
    sent = asyncio.run(
        run_websocket(FrontServer(upstream, settings), body, headers=headers, **more)
    )
    texts = [json.loads(item["text"]) for item in sent if item["type"] == "websocket.send"]
    assert all(item.pop("id") == "a" for item in texts)
    return [item["type"] for item in sent if item["type"] != "websocket.send"] + texts


def test_a_websocket_request_is_sent_again() -> None:
    start_of_stream = {**START, "headers": [(b"content-type", b"text/event-stream; charset=utf-8")]}
    first_chunk = {
        "type": "http.response.body",
        "body": b': still here\n\ndata: {"n": 1}\n\nda',
        "more_body": True,
    }
    second_chunk = {
        "type": "http.response.body",
        "body": b'ta: {"n": 2}\n\ndata: [DONE]\n\n',
        "more_body": False,
    }
    upstream = Script([UpstreamLost], [start_of_stream, first_chunk, second_chunk])
    messages = websocket_messages(upstream, {"stream": True})
    assert messages == ["websocket.accept", {"data": {"n": 1}}, {"data": {"n": 2}}, {"done": True}]
    assert json.loads(upstream.bodies[0]) == {"stream": True}
    start = {**START, "headers": [(b"content-type", b"application/json")]}
    complete_body = {
        "type": "http.response.body",
        "body": b'{"n": 3, "error": null}',
        "more_body": False,
    }
    assert websocket_messages(Script([start, complete_body]), {})[1:] == [
        {"data": {"n": 3, "error": None}},
        {"done": True},
    ]


def test_a_stream_over_a_websocket_is_resumed() -> None:
    first = {"type": "http.response.body", "body": b'data: {"n": 1}\n\n', "more_body": True}
    second = {**first, "body": b'data: {"n": 2}\n\ndata: [DONE]\n\n', "more_body": False}
    upstream = Script(
        [with_marks(START), with_marks(first, (0, 7, None)), UpstreamLost],
        [with_marks(START), with_marks(second)],
    )
    assert websocket_messages(upstream, {"stream": True})[1:] == [
        {"data": {"n": 1}},
        {"data": {"n": 2}},
        {"done": True},
    ]
    assert upstream.positions[1]["tokens"] == {0: [7]}


def test_errors_are_sent_over_a_websocket() -> None:
    start = {**START, "status": 400, "headers": [(b"content-type", b"application/json")]}
    raw = b'{"error": {"message": "no", "type": "invalid_request_error", "param": "n", "code": null, "n_ctx": 5}}'
    (_, message) = websocket_messages(
        Script([start, {"type": "http.response.body", "body": raw, "more_body": False}]), {}
    )
    assert message["error"] == json.loads(raw)["error"]
    for play in (
        [START, UpstreamLost],
        [{**START, "headers": [(b"content-type", b"application/json")]}, UpstreamLost],
    ):
        (_, message) = websocket_messages(Script(play), {})
        assert message["error"]["code"] == "model_lost"
    (_, message) = websocket_messages(Script(*[[UpstreamLost]] * front.MAX_TRIES), {})
    assert message["error"]["code"] == "model_unavailable"


def test_a_websocket_needs_its_path_its_key_and_an_allowed_origin() -> None:
    for more in (
        {"path": "/elsewhere"},
        {"keys": ("secret-key-1",)},
        {"headers": [(b"origin", b"https://evil.example")]},
        {"headers": [(b"host", b"evil.example")]},
    ):
        upstream = Script([START, END])
        assert websocket_messages(upstream, {}, **more) == ["websocket.close"]
        assert not upstream.n_requests
    key = [(b"authorization", b"Bearer secret-key-1")]
    assert (
        websocket_messages(Script([START, END]), {}, keys=("secret-key-1",), headers=key)[0]
        == "websocket.accept"
    )


def test_requests_are_refused_while_the_server_stops() -> None:
    async def stopping() -> list[Any]:
        server = FrontServer(Script([START, END]), ServerSettings(("tiny",)))
        await server.drain(1)
        return await run_request(server)

    assert asyncio.run(stopping())[0]["status"] == 503


def test_a_body_without_a_key_is_not_read() -> None:
    upstream = Script([START, END])
    settings = ServerSettings(("tiny",), max_body=100, keys=("secret-key-1",))
    asyncio.run(run_request(FrontServer(upstream, settings), b"x" * 1000))
    assert upstream.bodies == [b""]  # the application responds with 401


def test_a_response_that_is_a_list_is_one_document() -> None:
    async def scenario() -> None:
        documents = AnswerDocuments()
        await documents.send(PLAIN)
        await documents.send(
            {"type": "http.response.body", "body": b'[{"index": 0}, {"index": 1}]'}
        )
        documents.raise_error()
        assert documents.queue.get_nowait() == [{"index": 0}, {"index": 1}]

    asyncio.run(scenario())


def test_drain_waits_for_a_call_that_came_over_grpc() -> None:
    async def scenario() -> None:
        front_server = FrontServer(Script([START, EVENT, None]), ServerSettings(("tiny",)))
        answers = FrontAnswers(front_server)
        path = "/v1/chat/completions"
        documents = answers.documents(path, {"messages": []}, GrpcClient({}, "127.0.0.1"))
        assert await anext(documents) == 1
        assert answers.health().n_open == 1
        draining = asyncio.ensure_future(front_server.drain(60))
        for _ in range(20):
            await asyncio.sleep(0)
        assert not draining.done()
        await documents.aclose()
        await draining
        assert answers.health().n_open == 0

    asyncio.run(scenario())
