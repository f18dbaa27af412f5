"""The HTTP side of a server whose models are in other processes: it reads a request, hands it on,
and survives them.

A request that was lost before the first byte of its answer is asked again, as often as TRIES, and
so is one whose stream can go on where it stopped (known.py); such a one waits where all who are
left have as much to do as they take, for those whose model was lost come to them at once. Any other
is broken, which is told as an error event in a stream, and by closing the connection otherwise.
Nothing is lost without a word. Keys, models and limits are the application's, which runs where the
model is.
"""

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from functools import partial
from typing import Any, Protocol

from starlette.requests import Request
from starlette.types import Message, Receive, Scope, Send
from starlette.websockets import WebSocket

from llmcli.serve import keys, registry
from llmcli.serve.affinity import key_of
from llmcli.serve.bodies import Bodies, Room
from llmcli.serve.documents import Documents
from llmcli.serve.guard import Guard
from llmcli.serve.known import TOLD, Known, fresh
from llmcli.serve.origins import readable
from llmcli.serve.problems import Problem, document
from llmcli.serve.relay import portable
from llmcli.serve.routes.socket import SOCKET, Talk
from llmcli.serve.schema.base import Form, encoded
from llmcli.serve.settings import Settings
from llmcli.serve.stream import Gone, json_response, unless_gone, whole

TRIES = 3
PATIENCE = 30.0  # seconds that a request waits for a model that is being started again
RETRY_AFTER = 5
PAUSE = (
    0.5  # seconds before one whose answer was begun is asked again of those who have too much to do
)
STOPPING = 1012  # a WebSocket's code for a service that restarts
KEPT = (b"host", b"authorization", b"x-api-key")  # of a socket's headers, what its requests have


class Lost(Exception):
    """Whoever was answering is gone, with the answer."""


class Full(Lost):
    """Whoever should go on with it has too much to do."""


class Upstream(Protocol):
    """Those who answer: one process (child.py) or replicas (replicas.py)."""

    def ask(self, scope: dict[str, Any], body: bytes, key: bytes) -> AsyncGenerator[Message, None]:
        """The application's messages for one request; raises Lost. Closing it cancels the request."""
        ...

    async def wait(self, seconds: float) -> str:
        """Until somebody answers again: "", or why nobody does."""
        ...

    def stop(self) -> None:
        """End every answer now."""
        ...


class Front:
    """An ASGI application; also what server.py stops: `drain` waits for what is being answered."""

    def __init__(self, upstream: Upstream, settings: Settings) -> None:
        self.upstream, self.settings = upstream, settings
        self.talks: set[asyncio.Task[None]] = set()  # answers on their way over WebSockets
        self.room = Room(settings.max_body)
        self._guard, self._bodies = Guard(self, settings), Bodies(self._answer, self.room)
        registry.forms()  # read from their folder now, not while the first one waits
        self._open = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self.stopping = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One connection's request."""
        self._open += 1
        self._idle.clear()
        try:
            if scope["type"] == "websocket":
                await self._talk(scope, receive, send)
            elif scope["type"] == "http":
                await self._bodies(scope, receive, send)
        finally:
            self._open -= 1
            if not self._open:
                self._idle.set()

    async def drain(self, seconds: float) -> None:
        """Begin nothing new and wait for what there is, for so long."""
        self.stopping = True
        try:
            await asyncio.wait_for(self._idle.wait(), seconds)
        except TimeoutError:
            self.upstream.stop()

    def stop(self) -> None:
        """End every answer now."""
        self.stopping = True
        self.upstream.stop()

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            if self.stopping:
                raise Problem("the server is stopping", 503)
            request = Request(scope, receive)
            # The application tells who brings no key; whatever else such a request brings is not
            # read.
            known = keys.allowed(request.headers, self.settings.keys)
            raw = await whole(request, self.settings.max_body) if known else b""
            await unless_gone(receive, self._asked(portable(scope), raw, send))
        except Gone:
            return
        except Problem as error:
            headers = {"retry-after": str(RETRY_AFTER)} if error.status in (429, 503) else None
            told = json_response(document(error, scope["path"]), error.status, headers)
            await readable(told, self.settings)(scope, receive, send)

    async def _asked(self, scope: dict[str, Any], raw: bytes, send: Send) -> None:
        """Ask until somebody has answered; raises Problem where nobody does."""
        key, why = key_of(raw), ""
        patience = (
            0.0 if scope["path"].endswith("/health") else PATIENCE
        )  # who asks that wants to know now
        sent, tries, pauses = (
            _Sent(send, registry.form(scope["path"])),
            TRIES,
            round(PATIENCE / PAUSE),
        )
        while tries and pauses:
            if why := await self.upstream.wait(patience):
                break
            try:
                await self._once(sent.known.put(scope) if sent.known else scope, raw, key, sent)
                return
            except Full:
                pauses -= 1
                await asyncio.sleep(PAUSE)
            except Lost:
                tries -= 1
            if sent.over or not sent.known:
                break
            if self.stopping:
                why = "the server is stopping"
                break
        if sent.begun:
            await sent.broken()
            return
        what = (
            f"the model is not available: {why}"
            if why
            else f"the model was lost {TRIES} times at this request"
        )
        raise Problem(what, 503, code="model_unavailable")

    async def _once(self, scope: dict[str, Any], raw: bytes, key: bytes, sent: "_Sent") -> None:
        """Ask whoever answers next, and pass it on; raises Problem before the first byte, and Lost."""
        try:
            async with aclosing(self.upstream.ask(scope, raw, key)) as messages:
                async for message in messages:
                    await sent.send(message)
        except Problem as error:
            if not sent.begun:
                raise
            raise (Full if error.status == 429 else Lost) from None
        if not sent.begun:
            raise Problem(
                "the request could not be answered: a bug of ours, told where the server runs", 500
            )

    async def _talk(self, scope: Scope, receive: Receive, send: Send) -> None:
        """A WebSocket: its requests go on one by one, as over HTTP, so that it outlives whoever
        answers them.
        """
        if self.stopping:
            await send(
                {"type": "websocket.close", "code": STOPPING, "reason": "the server is stopping"}
            )
            return
        socket = WebSocket(scope, receive, send)
        try:
            self._guard.check("websocket", "GET", socket.headers)
        except Problem as error:
            await socket.close(1008, str(error)[:120])
            return
        if scope["path"] != SOCKET or not keys.allowed(socket.headers, self.settings.keys):
            await socket.close(
                1008, "a key is needed" if scope["path"] == SOCKET else "there is nothing here"
            )
            return
        await socket.accept()
        await Talk(socket, partial(self._answers, portable(scope)), self.talks, self.room).run()

    async def _answers(
        self, scope: dict[str, Any], path: str, body: Mapping[str, Any]
    ) -> AsyncGenerator[dict[str, Any], None]:
        headers = [(name, value) for name, value in scope["headers"] if name.lower() in KEPT]
        http = {
            **scope,
            "type": "http",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "headers": [*headers, (b"content-type", b"application/json")],
        }
        read = Documents()
        task = asyncio.ensure_future(self._asked(http, encoded(body), read.send))
        task.add_done_callback(read.over)
        try:
            while (found := await read.queue.get()) is not None:
                yield found
            await task
            read.check()
        finally:
            task.cancel()


class _Sent:
    """What of one answer has gone out, and what is known of it: None once nobody could go on."""

    def __init__(self, send: Send, form: type[Form] | None) -> None:
        self._send, self._form = send, form
        self.begun = self.over = False
        self.known: Known | None = fresh()

    async def send(self, message: Message) -> None:
        """Pass on what a model says; raises Lost where one that should go on does not, Full where
        it cannot yet.
        """
        told = message.get(TOLD)
        message = {name: value for name, value in message.items() if name != TOLD}
        head = message["type"] == "http.response.start"
        if head and self.begun:
            if told is None:
                raise Full if message["status"] == 429 else Lost
            return
        if told is None:
            self.known = None
        elif self.known:
            self.known.hear(told)
        if head:
            kinds = [value for name, value in message["headers"] if name.lower() == b"content-type"]
            if self._form and not any(
                kind.startswith(self._form.media_type.encode()) for kind in kinds
            ):
                self._form = None  # no stream, which words could be added to
        elif message["type"] == "http.response.body":
            self.over = not message.get("more_body")
        self.begun = True
        await self._send(message)

    async def broken(self) -> None:
        """Tell that no more comes. Where no words can, the server closes the connection early: the
        length tells.
        """
        if self.over or self._form is None:
            return
        told = Problem(
            "the model was lost in the middle of this answer; ask again", 503, code="model_lost"
        )
        await self._send(
            {"type": "http.response.body", "body": self._form.failed(told), "more_body": False}
        )
