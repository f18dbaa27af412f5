"""Request bodies in memory: large ones wait for the budget, small ones never do."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from llmcli.serve.http import body_budget
from tests.fixtures.server import Served
from tests.serve.http.routes.test_websocket import opened
from tests.serve.http.test_errors import post

MOST = 1 << 20
LARGE = b'{"prompt": "x", "max_tokens": 1, "user": "%s"}' % (
    b"y" * (body_budget.SMALL_BODY_BYTES + 1)
)


class Sender:
    """A client of an application: what it sends, and what was read of it."""

    def __init__(self, app: Any, size: int) -> None:
        self.parts: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.read: list[int] = []
        self.scope = {
            "type": "http",
            "headers": [(b"content-length", b"%d" % size)],
            "sender": self,
        }
        self.task = asyncio.ensure_future(app(self.scope, self.parts.get, self._hear))

    def send(self, size: int, more: bool) -> None:
        self.parts.put_nowait({"type": "http.request", "body": b"x" * size, "more_body": more})

    async def _hear(self, message: Any) -> None:
        pass


async def reading(scope: Any, receive: Any, send: Any) -> None:
    """Reads all, then answers."""
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        scope["sender"].read.append(len(message["body"]))
        more = message["more_body"]
    await send({"type": "http.response.start"})
    await send({"type": "http.response.body"})


def test_large_bodies_wait_for_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_budget, "MAX_LARGEST_BODIES", 1)

    async def scene() -> None:
        app = body_budget.BodyBudgetMiddleware(reading, body_budget.BodyBudget(MOST))
        first, second, small = (Sender(app, size) for size in (MOST, MOST, 9))
        for one in (first, second):
            one.send(body_budget.SMALL_BODY_BYTES + 1, more=True)
        small.send(9, more=False)
        await small.task
        assert (len(first.read), len(second.read), small.read) == (1, 0, [9])
        first.send(5, more=False)
        await first.task
        second.send(5, more=False)
        await second.task
        assert second.read == [body_budget.SMALL_BODY_BYTES + 1, 5]
        gone, last = Sender(app, MOST), Sender(app, MOST)  # who leaves gives its room back, too
        gone.send(body_budget.SMALL_BODY_BYTES + 1, more=True)
        gone.parts.put_nowait({"type": "http.disconnect"})
        last.send(body_budget.SMALL_BODY_BYTES + 1, more=False)
        await asyncio.gather(gone.task, last.task)

    asyncio.run(asyncio.wait_for(scene(), 30))


async def streaming(scope: Any, receive: Any, send: Any) -> None:
    """Reads all, then answers until the client goes."""
    while (await receive())["more_body"]:
        pass
    await send({"type": "http.response.start"})
    while (await receive())["type"] != "http.disconnect":
        pass


def test_who_leaves_a_stream_needs_no_room_for_that(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_budget, "MAX_LARGEST_BODIES", 1)

    async def scene() -> None:
        app = body_budget.BodyBudgetMiddleware(streaming, body_budget.BodyBudget(MOST))
        first = Sender(app, MOST)
        first.send(MOST, more=False)
        await asyncio.sleep(0)
        second = Sender(app, MOST)  # has all the room from now on
        second.send(body_budget.SMALL_BODY_BYTES + 1, more=True)
        await asyncio.sleep(0)
        first.parts.put_nowait({"type": "http.disconnect"})
        await first.task
        second.task.cancel()

    asyncio.run(asyncio.wait_for(scene(), 10))


def test_who_finds_no_room_is_told_to_come_back(
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


def test_bodies_give_their_room_back(
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


def over_a_socket(served: Served, text: str) -> str:
    """What a request over a WebSocket ends with."""
    with opened(served) as socket:
        body = {"prompt": "x", "max_tokens": 1, "user": text}
        socket.send(json.dumps({"id": "a", "path": "/v1/completions", "body": body}))
        while True:
            found = json.loads(socket.recv(timeout=60))
            if found.keys() & {"done", "error"}:
                return found.get("error", {}).get("code") or "done"


def over_grpc(served: Served, text: str) -> str:
    grpc = pytest.importorskip("grpc")
    from tests.serve.grpc.test_service import KIND, talking

    with talking(served) as stub:
        request = KIND["GenerateRequest"](prompt="x", max_tokens=1)
        request.more.update({"user": text})
        try:
            return "done" if list(stub.Generate(request)) else ""
        except grpc.RpcError as error:
            return "busy" if error.code() == grpc.StatusCode.UNAVAILABLE else str(error)


@pytest.mark.parametrize("send", [over_a_socket, over_grpc])
def test_every_protocol_takes_room_from_one_account(
    serve: Callable[..., Served],
    monkeypatch: pytest.MonkeyPatch,
    send: Callable[[Served, str], str],
) -> None:
    large = "y" * (body_budget.SMALL_BODY_BYTES + 1)
    monkeypatch.setattr(body_budget, "MAX_LARGEST_BODIES", 1)
    monkeypatch.setattr(body_budget, "RESERVE_SECONDS", 0)
    served = serve(max_body=len(LARGE) + 1000, **({"grpc_port": 0} if send is over_grpc else {}))
    budget = served.server.config.app.state.service.body_budget
    assert [send(served, large) for _ in range(3)] == ["done"] * 3  # each gave its room back
    reservation = asyncio.run(budget.reserve(len(LARGE)))
    assert (send(served, large), send(served, "y")) == ("busy", "done")
    assert post(served, LARGE, "/v1/completions")[0] == 503
    reservation.release()
    assert send(served, large) == "done"
