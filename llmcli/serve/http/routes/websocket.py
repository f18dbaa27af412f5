"""`/v1/ws`: requests of the HTTP API over a WebSocket, several at once.

A request is {"id": "a", "path": "/v1/chat/completions", "body": {…}}. The path is that of an API
form (api/forms/base.py) or /v1/embeddings. All messages of its answer have the same id:

- {"id": "a", "data": {…}} for each chunk of a stream, or once with the complete response,
- {"id": "a", "done": true} at the end,
- {"id": "a", "error": {…}} instead of the end if the request fails.

The message {"id": "a", "cancel": true} cancels the request within one step of the engine. Closing
the socket cancels all its requests. The message {"id": "a", "action": "reasoning_end"} ends the
thinking of a stream, so that the reply follows; {"id": "a", "control": {"success": true, …}}
confirms it. It works for the APIs whose chunks have the id of the response.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing, suppress
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

from starlette.websockets import WebSocket, WebSocketDisconnect

from llmcli.api.bodies.base import JsonObject, RequestBody, honored
from llmcli.api.bodies.checks import read_body
from llmcli.api.embeddings import PATH as EMBEDDINGS_PATH
from llmcli.api.errors import ApiError, as_api_error, error_document
from llmcli.api.forms import FORMS
from llmcli.api.forms.base import encode_json
from llmcli.serve.engine_thread.bug_log import log_bug
from llmcli.serve.engine_thread.document_stream import stream_documents
from llmcli.serve.http import api_keys
from llmcli.serve.http.body_budget import BodyBudget, BodyReservation
from llmcli.serve.http.exchange import build_form, parse_json
from llmcli.serve.http.routes.answer_control import END_THINKING
from llmcli.serve.http.routes.embeddings import answer_embeddings
from llmcli.serve.http.service import Route, Service
from llmcli.serve.http.websocket_connection import RESERVATION_KEY
from quant.errors import UserError

MAX_REQUESTS = 64  # running requests of one socket
MAX_ID_CHARACTERS = 100
SOCKET_PATH = "/v1/ws"
# Takes the path and the body of a request, and yields the JSON objects of its answer. Raises
# UserError. Closing the generator cancels the answer.
AnswerFunction = Callable[[str, Mapping[str, Any]], AsyncGenerator[dict[str, Any], None]]
# Takes the id of a running response, and returns whether its thinking was ended.
EndThinkingFunction = Callable[[str], Awaitable[bool]]


class SocketMessage(RequestBody):
    """A message of a client: a request, a change of one, or its end."""

    reports_unknown: ClassVar[bool] = False
    id: str = honored("the name of the request", ...)
    cancel: bool | None = honored("end the request with this id")
    action: Literal["reasoning_end"] | None = honored("reasoning_end: end the thinking now")
    path: str | None = honored("the path of the API")
    body: Annotated[dict[str, Any], JsonObject("an object")] | None = honored(
        "the body of the request"
    )


class SocketSession:
    """One WebSocket, and the tasks that answer its requests. `ask`: answers one request.
    `end_thinking`: ends the thinking of an answer. `all_tasks`: the server's set of such tasks, to
    which this session adds its own. `budget`: the memory for large messages.
    """

    def __init__(
        self,
        socket: WebSocket,
        ask: AnswerFunction,
        end_thinking: EndThinkingFunction,
        all_tasks: "set[asyncio.Task[None]]",
        budget: BodyBudget,
    ) -> None:
        self._socket, self._ask, self._all_tasks, self._budget = socket, ask, all_tasks, budget
        self._end_thinking = end_thinking
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._response_ids: dict[str, str] = {}  # by the id of a request, once a chunk had it
        self._ending: set[str] = set()  # requests whose thinking ends as soon as they have an id
        # the tasks that end the thinking of answers, with the ids of the requests
        self._changes: dict[asyncio.Task[None], str] = {}
        self._group = asyncio.TaskGroup()
        self._sending = asyncio.Lock()
        self.is_closed = False

    async def run(self) -> None:
        """Handle messages until the socket closes, then cancel its running requests."""
        async with self._group:
            with suppress(WebSocketDisconnect):
                while message := await self._next_message():
                    await self._handle(*message)
            self.is_closed = True
            for task in (*self._tasks.values(), *self._changes):
                task.cancel()

    async def _next_message(self) -> tuple[str, BodyReservation] | None:
        """Return the next message and its memory reservation. Return None if the socket has closed,
        or after a binary message.
        """
        message = await self._socket.receive()
        text, reservation = (
            message.get("text"),
            message.get(RESERVATION_KEY) or BodyReservation(self._budget, 0),
        )
        if text is None:
            reservation.release()
            return None
        return text, reservation

    async def _handle(self, text: str, reservation: BodyReservation) -> None:
        """Parse a message, and start or cancel a request. Send an error if the message is
        invalid.
        """
        name: str | None = None
        started = False
        try:
            raw = text.encode("utf-8", "surrogatepass")
            reservation = reservation if reservation.size else await self._budget.reserve(len(raw))
            document = await parse_json(raw)
            requested = document.get("id")
            if isinstance(requested, str) and 0 < len(requested) <= MAX_ID_CHARACTERS:
                name = requested  # before the other fields are read: their errors have it
            message = read_body(SocketMessage, document, [])
            if name is None:
                raise ApiError(f"id must have 1 to {MAX_ID_CHARACTERS} characters", param="id")
            if message.cancel:
                if task := self._tasks.get(name):
                    task.cancel()
            elif message.action:
                self._end_thinking_of(name)
            elif name in self._tasks:
                raise ApiError(
                    "another request with this id is still running", param="id", code="id_in_use"
                )
            elif len(self._tasks) >= MAX_REQUESTS:
                raise ApiError(
                    f"a socket has at most {MAX_REQUESTS} running requests", 429, code="busy"
                )
            else:
                self._start_request(name, message, reservation)
                started = True
                # Let the task begin: a task that is cancelled before it begins would not send its
                # last message.
                await asyncio.sleep(0)
        except UserError as error:
            await self._send({"id": name, **error_document(as_api_error(error))})
        finally:
            if not started:
                reservation.release()

    def _start_request(
        self, name: str, message: SocketMessage, reservation: BodyReservation
    ) -> None:
        """Start a task that answers a request. Raises ApiError if the request is invalid."""
        path, body = message.path, message.body
        if path is None:
            raise ApiError("path is missing", param="path")
        if path != EMBEDDINGS_PATH and path not in FORMS:
            available = ", ".join(sorted([*FORMS, EMBEDDINGS_PATH]))
            raise ApiError(f"path must be one of {available}", 404, param="path", code="not_found")
        if body is None:
            raise ApiError("body is missing", param="body")
        task = self._tasks[name] = self._group.create_task(
            self._answer(name, path, body, reservation)
        )
        self._all_tasks.add(task)
        task.add_done_callback(self._all_tasks.discard)
        task.add_done_callback(lambda _: reservation.release())

    def _end_thinking_of(self, name: str) -> None:
        """End the thinking of the answer to a request, now or when it begins, in another task: it
        may take long until the model has done so, and other messages must not wait for that. Raises
        ApiError if too many such tasks run.
        """
        if name in self._tasks and name not in self._response_ids:
            self._ending.add(name)
            return
        if len(self._changes) >= MAX_REQUESTS:
            raise ApiError(
                f"a socket ends at most {MAX_REQUESTS} thoughts at once", 429, code="busy"
            )
        self._ending.discard(name)
        work = self._change_answer(name, self._response_ids.get(name))
        task = self._group.create_task(work)
        self._changes[task] = name
        task.add_done_callback(lambda _: self._changes.pop(task))

    async def _change_answer(self, name: str, response_id: str | None) -> None:
        """End the thinking of the response to a request, and confirm it. `response_id`: None if it
        has none. A bug must not end the group of tasks, and with it the socket.
        """
        success = False
        try:
            success = response_id is not None and await self._end_thinking(response_id)
        except Exception as error:  # noqa: BLE001 (the client reads that it has failed)
            log_bug(error)
        await self._send({"id": name, "control": {"action": END_THINKING, "success": success}})

    async def _answer(
        self, name: str, path: str, body: Mapping[str, Any], reservation: BodyReservation
    ) -> None:
        """Send the messages of a request's answer."""
        last_fields: dict[str, Any] = {"done": True}
        try:
            async with aclosing(self._ask(path, body)) as documents:
                async for data in documents:
                    reservation.release()
                    await self._send({"id": name, "data": data})
                    if name not in self._response_ids and (found := read_response_id(data)):
                        self._response_ids[name] = found
                        if name in self._ending:
                            self._end_thinking_of(name)
        except asyncio.CancelledError:
            if self.is_closed:
                raise
            last_fields = {"done": True, "cancelled": True}
        except Exception as error:  # noqa: BLE001 (the client receives it)
            log_bug(error)
            last_fields = error_document(as_api_error(error))
        finally:
            del self._tasks[name]
            self._response_ids.pop(name, None)
        if name in self._ending:  # it had no id
            self._ending.discard(name)
            await self._change_answer(name, None)
        # the last message of a request comes after all others with its id
        changes = [task for task, changed in self._changes.items() if changed == name]
        if changes:
            await asyncio.wait(changes)
        await self._send({"id": name, **last_fields})

    async def _send(self, message: dict[str, Any]) -> None:
        # A client that reads slowly delays its own answers, but never the engine.
        async with self._sending:
            with suppress(WebSocketDisconnect):  # run() receives the disconnect as well
                await self._socket.send_text(encode_json(message).decode())


async def serve_socket(service: Service, socket: WebSocket) -> None:
    """Accept a WebSocket and handle its requests until it closes."""
    client = api_keys.connected_client(socket, service.settings.keys)
    await socket.accept()
    await SocketSession(
        socket,
        partial(answer_documents, service, client),
        partial(end_thinking, service, client),
        service.socket_answers,
        service.body_budget,
    ).run()


async def end_thinking(service: Service, client: str, response_id: str) -> bool:
    """End the thinking of a client's running response, and return whether it was thinking."""
    return bool(await service.bridge.end_thinking(response_id, client))


def read_response_id(document: Mapping[str, Any]) -> str:
    """Return the id of the response in a chunk of any API; "" if it has none."""
    for part in (document.get("response"), document.get("message"), document):
        if isinstance(part, Mapping) and isinstance(found := part.get("id"), str):
            return found
    return ""


async def answer_documents(
    service: Service, client: str, path: str, body: Mapping[str, Any]
) -> AsyncGenerator[dict[str, Any], None]:
    """Yield the JSON objects of the answer to a request: the chunks of a stream, or the complete
    response. The answer is computed by the model in this process.
    """
    if path == EMBEDDINGS_PATH:
        yield await answer_embeddings(service, body, client)
        return
    form = await build_form(service.bridge, path, body, service.settings)
    async with aclosing(stream_documents(service.bridge, form, client)) as documents:
        async for chunk in documents:
            yield chunk


ROUTES = (Route(SOCKET_PATH, serve_socket, is_websocket=True),)
