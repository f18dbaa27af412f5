"""`/v1/ws`: the requests of the HTTP API over a WebSocket, several at once.

A request is {"id": "a", "path": "/v1/chat/completions", "body": {…}}; the path is that of a form,
or /v1/embeddings. Messages of its answer have the same id: {"id": "a", "data": {…}} for each chunk
of a stream, or once with the whole document; at the end {"id": "a", "done": true}, or only {"id":
"a", "error": {…}}. {"id": "a", "cancel": true} cancels the request within a step. Closing the
socket cancels all its requests.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing, suppress
from functools import partial
from typing import Any

from starlette.websockets import WebSocket, WebSocketDisconnect

from llmcli.api import registry
from llmcli.api.errors import Problem, document, problem
from llmcli.api.fields import Fields
from llmcli.api.forms.base import encoded
from llmcli.serve.engine_thread.document_stream import chunks
from llmcli.serve.http import api_keys
from llmcli.serve.http.body_budget import Place, Room
from llmcli.serve.http.exchange import asked, parsed
from llmcli.serve.http.routes.embeddings import embedded
from llmcli.serve.http.service import Route, Service
from llmcli.serve.http.websocket_connection import PLACE
from quant.errors import Refusal

AT_ONCE = 64  # running requests of one socket
LONGEST_ID = 100  # characters
SOCKET, EMBEDDINGS = "/v1/ws", "/v1/embeddings"


# Yields the documents that answer a path's body; raises UserError. Closing it ends the answer.
Ask = Callable[[str, Mapping[str, Any]], AsyncGenerator[dict[str, Any], None]]


class Talk:
    """One socket and its running requests, which are also kept in the server's set `all_tasks`."""

    def __init__(
        self, socket: WebSocket, ask: Ask, talks: "set[asyncio.Task[None]]", budget: Room
    ) -> None:
        self._socket, self._ask, self._all_tasks, self._budget = socket, ask, talks, budget
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._group = asyncio.TaskGroup()
        self._sending = asyncio.Lock()
        self.closed = False

    async def run(self) -> None:
        """Serve the socket until it closes; a bug in one request closes it."""
        async with self._group:
            with suppress(WebSocketDisconnect):
                while message := await self._next_message():
                    await self._handle(*message)
            self.closed = True
            for task in self._tasks.values():
                task.cancel()

    async def _next_message(self) -> tuple[str, Place] | None:
        """Return the next message and its reservation; None at the end or for a binary message."""
        message = await self._socket.receive()
        text, reservation = message.get("text"), message.get(PLACE) or Place(self._budget, 0)
        if text is None:
            reservation.leave()
            return None
        return text, reservation

    async def _handle(self, text: str, reservation: Place) -> None:
        name: str | None = None
        begun = False
        try:
            raw = text.encode("utf-8", "surrogatepass")
            reservation = reservation if reservation.size else await self._budget.take(len(raw))
            fields = Fields(parsed(raw))
            name = fields.needed("id")
            if not 0 < len(name) <= LONGEST_ID:
                name = None
                raise Problem(f"id must have 1 to {LONGEST_ID} characters", param="id")
            if fields.flag("cancel"):
                if task := self._tasks.get(name):
                    task.cancel()
            elif name in self._tasks:
                raise Problem(
                    "another request with this id is still running", param="id", code="id_in_use"
                )
            elif len(self._tasks) >= AT_ONCE:
                raise Problem(f"a socket has at most {AT_ONCE} running requests", 429, code="busy")
            else:
                self._start_request(name, fields, reservation)
                begun = True
                # A task that is cancelled before its first step would send no last message.
                await asyncio.sleep(0)
        except Refusal as error:
            await self._send({"id": name, **document(problem(error))})
        finally:
            if not begun:
                reservation.leave()

    def _start_request(self, name: str, fields: Fields, reservation: Place) -> None:
        path, body = fields.needed("path"), fields.table("body")
        if path != EMBEDDINGS and path not in registry.forms():
            available = ", ".join(sorted([*registry.forms(), EMBEDDINGS]))
            raise Problem(f"path must be one of {available}", 404, param="path", code="not_found")
        if body is None:
            raise Problem("body is missing", param="body")
        task = self._tasks[name] = self._group.create_task(
            self._answer(name, path, body.values, reservation)
        )
        self._all_tasks.add(task)
        task.add_done_callback(self._all_tasks.discard)
        task.add_done_callback(lambda _: reservation.leave())

    async def _answer(
        self, name: str, path: str, body: Mapping[str, Any], reservation: Place
    ) -> None:
        last: dict[str, Any] = {"done": True}
        try:
            async with aclosing(self._ask(path, body)) as documents:
                async for data in documents:
                    reservation.leave()
                    await self._send({"id": name, "data": data})
        except asyncio.CancelledError:
            if self.closed:
                raise
            last = {"done": True, "cancelled": True}
        except Refusal as error:
            last = document(problem(error))
        finally:
            del self._tasks[name]
        await self._send({"id": name, **last})

    async def _send(self, message: dict[str, Any]) -> None:
        # A slow reader delays its own answers, never the engine.
        async with self._sending:
            with suppress(WebSocketDisconnect):  # run() receives the disconnect, too
                await self._socket.send_text(encoded(message).decode())


async def talk(service: Service, socket: WebSocket) -> None:
    """Accept a socket and serve it until it closes."""
    address = socket.client.host if socket.client else ""
    client = api_keys.client(socket.headers, address, service.settings.keys)
    await socket.accept()
    await Talk(socket, partial(answers, service, client), service.talks, service.room).run()


async def answers(
    service: Service, client: str, path: str, body: Mapping[str, Any]
) -> AsyncGenerator[dict[str, Any], None]:
    """Yield the documents of an answer by this process's model."""
    if path == EMBEDDINGS:
        yield await embedded(service, body)
        return
    form = await asked(service.bridge, path, body, service.settings)
    async with aclosing(chunks(service.bridge, form, client)) as documents:
        async for chunk in documents:
            yield chunk


ROUTES = (Route(SOCKET, talk, socket=True),)
