"""The memory of request bodies: large bodies wait for the budget, small bodies never do."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from llmcli.serve.http import body_budget
from tests.fixtures.event_loop import run_within
from tests.fixtures.server import Served
from tests.serve.http.routes.test_websocket import open_websocket
from tests.serve.http.test_errors import post

LARGEST = 1 << 20
LARGE = b'{"prompt": "x", "max_tokens": 1, "user": "%s"}' % (
    b"y" * (body_budget.SMALL_BODY_BYTES + 1)
)


class Sender:
    """A client of an ASGI application: it sends a body in parts, and records what the application
    has read.
    """

    def __init__(self, app: Any, size: int) -> None:
        self.messages: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.read: list[int] = []
        self.scope = {
            "type": "http",
            "headers": [(b"content-length", b"%d" % size)],
            "sender": self,
        }
        self.task = asyncio.ensure_future(app(self.scope, self.messages.get, self._receive))

    def send(self, size: int, more: bool) -> None:
        self.messages.put_nowait({"type": "http.request", "body": b"x" * size, "more_body": more})

    async def _receive(self, message: Any) -> None:
        pass


async def read_then_respond(scope: Any, receive: Any, send: Any) -> None:
    """Read the whole body, then respond."""
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        scope["sender"].read.append(len(message["body"]))
        more = message["more_body"]
    await send({"type": "http.response.start"})
    await send({"type": "http.response.body"})


def test_large_bodies_wait_for_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_budget, "MAX_LARGEST_BODIES", 1)

    async def scenario() -> None:
        app = body_budget.BodyBudgetMiddleware(read_then_respond, body_budget.BodyBudget(LARGEST))
        first, second, small = (Sender(app, size) for size in (LARGEST, LARGEST, 9))
        for sender in (first, second):
            sender.send(body_budget.SMALL_BODY_BYTES + 1, more=True)
        small.send(9, more=False)
        await small.task
        assert (len(first.read), len(second.read), small.read) == (1, 0, [9])
        first.send(5, more=False)
        await first.task
        second.send(5, more=False)
        await second.task
        assert second.read == [body_budget.SMALL_BODY_BYTES + 1, 5]
        disconnecting, last = (
            Sender(app, LARGEST),
            Sender(app, LARGEST),
        )  # a disconnect frees the memory, too
        disconnecting.send(body_budget.SMALL_BODY_BYTES + 1, more=True)
        disconnecting.messages.put_nowait({"type": "http.disconnect"})
        last.send(body_budget.SMALL_BODY_BYTES + 1, more=False)
        await asyncio.gather(disconnecting.task, last.task)

    run_within(30, scenario())


async def stream_until_disconnect(scope: Any, receive: Any, send: Any) -> None:
    """Read the whole body, then stream until the client disconnects."""
    while (await receive())["more_body"]:
        pass
    await send({"type": "http.response.start"})
    while (await receive())["type"] != "http.disconnect":
        pass


def test_a_disconnect_during_a_stream_reserves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_budget, "MAX_LARGEST_BODIES", 1)

    async def scenario() -> None:
        app = body_budget.BodyBudgetMiddleware(
            stream_until_disconnect, body_budget.BodyBudget(LARGEST)
        )
        first = Sender(app, LARGEST)
        first.send(LARGEST, more=False)
        await asyncio.sleep(0)
        second = Sender(app, LARGEST)  # reserves all of the memory
        second.send(body_budget.SMALL_BODY_BYTES + 1, more=True)
        await asyncio.sleep(0)
        first.messages.put_nowait({"type": "http.disconnect"})
        await first.task
        second.task.cancel()

    run_within(10, scenario())


def test_a_large_body_without_memory_gets_retry_after(
    serve: Callable[..., Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(body_budget, "MAX_LARGEST_BODIES", 0)
    monkeypatch.setattr(body_budget, "RESERVE_SECONDS", 0)
    served = serve()
    status, headers, found = post(served, LARGE, "/v1/completions")
    assert (status, found["error"]["code"], headers["retry-after"]) == (
        503,
        "busy",
        str(body_budget.RETRY_AFTER_SECONDS),
    )
    assert post(served, b'{"prompt": "x", "max_tokens": 1}', "/v1/completions")[0] == 200


def test_bodies_free_their_memory(
    serve: Callable[..., Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(body_budget, "MAX_LARGEST_BODIES", 1)
    monkeypatch.setattr(body_budget, "RESERVE_SECONDS", 0)
    served = serve(max_body=len(LARGE))
    for raw, status in (
        (LARGE, 200),
        (LARGE, 200),
        (LARGE[:-1], 400),
        (LARGE + b" ", 413),
        (LARGE, 200),
    ):
        assert post(served, raw, "/v1/completions")[0] == status


def over_websocket(served: Served, text: str) -> str:
    """Send a request over a WebSocket. Return the code of its error, or "done"."""
    with open_websocket(served) as socket:
        body = {"prompt": "x", "max_tokens": 1, "user": text}
        socket.send(json.dumps({"id": "a", "path": "/v1/completions", "body": body}))
        while True:
            found = json.loads(socket.recv(timeout=60))
            if found.keys() & {"done", "error"}:
                return found.get("error", {}).get("code") or "done"


def over_grpc(served: Served, text: str) -> str:
    grpc = pytest.importorskip("grpc")
    from tests.serve.grpc.test_service import MESSAGE_CLASSES, open_stub

    with open_stub(served) as stub:
        request = MESSAGE_CLASSES["GenerateRequest"](prompt="x", max_tokens=1)
        request.more.update({"user": text})
        try:
            return "done" if list(stub.Generate(request)) else ""
        except grpc.RpcError as error:
            return "busy" if error.code() == grpc.StatusCode.UNAVAILABLE else str(error)


@pytest.mark.parametrize("send", [over_websocket, over_grpc])
def test_all_protocols_share_the_budget(
    serve: Callable[..., Served],
    monkeypatch: pytest.MonkeyPatch,
    send: Callable[[Served, str], str],
) -> None:
    large = "y" * (body_budget.SMALL_BODY_BYTES + 1)
    monkeypatch.setattr(body_budget, "MAX_LARGEST_BODIES", 1)
    monkeypatch.setattr(body_budget, "RESERVE_SECONDS", 0)
    served = serve(max_body=len(LARGE) + 1000, **({"grpc_port": 0} if send is over_grpc else {}))
    budget = served.server.config.app.state.service.body_budget
    assert [send(served, large) for _ in range(3)] == ["done"] * 3  # each has freed its memory
    reservation = asyncio.run(budget.reserve(len(LARGE)))
    assert (send(served, large), send(served, "y")) == ("busy", "done")
    assert post(served, LARGE, "/v1/completions")[0] == 503
    reservation.release()
    assert send(served, large) == "done"
