"""The front server: the HTTP side of a server whose models run in other processes. It reads
requests, forwards them to a model, and survives the loss of a model.

If the model is lost before the first byte of a response, the request is sent again, up to MAX_TRIES
times if the model fails, and MAX_KILLS times if its process is killed. So is a stream that can be
continued (stream_resume.py). Such a stream also waits while the remaining models are busy, because
they receive all requests of the lost model at once. In all other cases the response is broken: a
stream ends with an error event, any other response with a closed connection.

The application, which runs in the process of the model, checks keys, model names and limits.
"""

import asyncio
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send
from starlette.websockets import WebSocket

from llmcli.api.errors import ApiError, error_document
from llmcli.api.forms import find_form
from llmcli.api.forms.base import ApiForm, encode_json
from llmcli.api.server_settings import ServerSettings
from llmcli.api.stream_resume import MARKS_KEY, StreamPosition, new_position
from llmcli.serve.http import api_keys
from llmcli.serve.http.access import KEY_HEADERS
from llmcli.serve.http.asgi_documents import AnswerDocuments
from llmcli.serve.http.body_budget import BodyBudget, BodyBudgetMiddleware
from llmcli.serve.http.cors import with_cors
from llmcli.serve.http.exchange import (
    ClientDisconnected,
    cancel_on_disconnect,
    json_response,
    parse_json,
    read_all,
)
from llmcli.serve.http.origin_guard import OriginGuard
from llmcli.serve.http.request_ids import RequestIdMiddleware
from llmcli.serve.http.routes.answer_control import CONTROL_PATHS, END_THINKING
from llmcli.serve.http.routes.websocket import SOCKET_PATH, SocketSession
from llmcli.serve.processes.asgi_relay import portable_scope
from llmcli.serve.processes.prefix_affinity import prefix_key

MAX_TRIES = 3  # how often a request is sent to a model that then fails
MAX_KILLS = 30  # how often a request is sent again because something else has ended the process
RESTART_WAIT_SECONDS = 30.0  # seconds that a request waits for a model that is restarting
RETRY_AFTER_SECONDS = 5  # value of Retry-After
BUSY_PAUSE_SECONDS = 0.5  # pause before a stream is sent again because the models were busy
RESTART_CLOSE_CODE = 1012  # WebSocket close code for a service that restarts
# key of ASGI messages that only report that an answer waits, and are no part of it
PROGRESS_KEY = "llmcli.progress"
# headers of a WebSocket that are copied to the requests in its messages
INHERITED_HEADERS = (b"host", b"authorization", b"x-api-key")


class UpstreamLost(Exception):
    """The process that computed an answer has ended, so the answer is lost."""


class UpstreamKilled(UpstreamLost):
    """The process was ended from outside, or before it had the request, which is thus not the
    cause.
    """


class UpstreamBusy(UpstreamLost):
    """The process that should continue a stream is too busy to accept the request now."""


@dataclass(slots=True)
class TriesLeft:
    """How often a request may still be sent: after a failure of the model, and after a kill."""

    failures: int = MAX_TRIES
    kills: int = MAX_KILLS

    def count(self, error: UpstreamLost) -> None:
        """Count the loss of an answer."""
        if isinstance(error, UpstreamKilled):
            self.kills -= 1
        else:
            self.failures -= 1

    def __bool__(self) -> bool:
        """Return whether the request may be sent again."""
        return self.failures > 0 and self.kills > 0

    def as_error(self) -> ApiError:
        """Return the error of a request that may not be sent again."""
        n_losses = MAX_TRIES - self.failures + MAX_KILLS - self.kills
        return ApiError(
            f"the model was lost {n_losses} times during this request",
            503,
            code="model_unavailable",
        )


class Upstream(Protocol):
    """What the front server needs from the models: a single process (supervised_process.py) or
    replicas (ray_replicas.py).
    """

    def ask(self, scope: dict[str, Any], body: bytes, key: bytes) -> AsyncGenerator[Message, None]:
        """Send a request to a model, and yield the ASGI messages of the response. `body`: the
        request's body. `key`: the hash of the prompt's beginning (prefix_affinity.py). Raises
        UpstreamLost. Closing the generator cancels the request.
        """
        ...

    async def wait(self, seconds: float) -> str:
        """Wait until a model can answer requests. Return "", or after `seconds` the reason why none
        can.
        """
        ...

    def stop(self) -> None:
        """Cancel every answer now."""
        ...


class FrontServer:
    """The ASGI application of the front server. Like an EngineBridge, it has `drain` and `stop`,
    with which HttpServer ends the running answers.
    """

    def __init__(self, upstream: Upstream, settings: ServerSettings) -> None:
        self.upstream, self.settings = upstream, settings
        self.socket_answers: set[asyncio.Task[None]] = set()  # running answers over WebSockets
        self.body_budget = BodyBudget(settings.max_body)
        self._guard, self._bodies = (
            OriginGuard(self, settings),
            RequestIdMiddleware(BodyBudgetMiddleware(self._answer, self.body_budget)),
        )
        self._n_open = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self.is_stopping = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request or WebSocket."""
        with self.counted():
            if scope["type"] == "websocket":
                await self._serve_socket(scope, receive, send)
            elif scope["type"] == "http":
                await self._bodies(scope, receive, send)

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count a request, a socket or a call as open during the `with` block, so that drain()
        waits for it.
        """
        self._n_open += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._n_open -= 1
            if not self._n_open:
                self._idle.set()

    @property
    def n_open(self) -> int:
        """The requests, sockets and calls that are open."""
        return self._n_open

    async def drain(self, seconds: float) -> None:
        """Accept no more requests, and wait at most `seconds` for the running ones. Then cancel the
        rest.
        """
        self.is_stopping = True
        try:
            async with asyncio.timeout(seconds):
                await self._idle.wait()
        except TimeoutError:
            self.upstream.stop()

    def stop(self) -> None:
        """Accept no more requests, and cancel every answer now."""
        self.is_stopping = True
        self.upstream.stop()

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read a request's body and forward the request. Respond with an error if this fails."""
        try:
            if self.is_stopping:
                raise ApiError("the server is stopping", 503)
            request = Request(scope, receive)
            # Without a valid key the body is not read, and the application refuses the request.
            has_key = api_keys.is_allowed(request.headers, self.settings.keys)
            raw = await read_all(request, self.settings.max_body) if has_key else b""
            await cancel_on_disconnect(receive, self._forward(portable_scope(scope), raw, send))
        except ClientDisconnected:
            return
        except ApiError as error:
            response = error_response(error, scope["path"])
            await with_cors(response, self.settings)(scope, receive, send)

    async def _read_key(self, raw: bytes) -> bytes:
        """Return the key by which the upstream chooses a replica for a request's body."""
        return await prefix_key_of_body(raw)

    async def _forward(self, scope: dict[str, Any], raw: bytes, send: Send) -> None:
        """Send a request to the models until one has answered it; see the beginning of this file
        for the cases. Raises ApiError if no response has begun.
        """
        key, reason = await self._read_key(raw), ""
        # A health check must report the current state, so it does not wait.
        wait_seconds = 0.0 if scope["path"].endswith("/health") else RESTART_WAIT_SECONDS
        sent = _SentAnswer(send, find_form(scope["path"]))
        tries_left, pauses_left = TriesLeft(), round(RESTART_WAIT_SECONDS / BUSY_PAUSE_SECONDS)
        while tries_left and pauses_left:
            if reason := await self.upstream.wait(wait_seconds):
                break
            try:
                await self._forward_once(
                    sent.position.attach_to(scope) if sent.position else scope, raw, key, sent
                )
                return
            except UpstreamBusy:
                pauses_left -= 1
                await asyncio.sleep(BUSY_PAUSE_SECONDS)
            except UpstreamLost as error:
                tries_left.count(error)
            if sent.is_complete or not sent.position:
                break
            if self.is_stopping:
                reason = "the server is stopping"
                break
        if sent.has_begun:
            await sent.send_break()
            return
        if not reason:
            raise tries_left.as_error()
        raise ApiError(f"the model is not available: {reason}", 503, code="model_unavailable")

    async def _forward_once(
        self, scope: dict[str, Any], raw: bytes, key: bytes, sent: "_SentAnswer"
    ) -> None:
        """Send the request to a model once and forward the response. An ApiError of the model is
        raised unchanged before the first byte of the response; after it, as UpstreamBusy (status
        429) or UpstreamLost.
        """
        try:
            async with aclosing(self.upstream.ask(scope, raw, key)) as messages:
                async for message in messages:
                    await sent.send(message)
        except ApiError as error:
            if not sent.has_begun:
                raise
            if not sent.has_answer:
                await sent.send_error(error)
                return
            raise (UpstreamBusy if error.status == 429 else UpstreamLost) from None
        if not sent.has_begun:
            raise ApiError(
                "the request could not be answered because of a bug; see the server's log", 500
            )

    async def _serve_socket(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a WebSocket. Each of its requests is forwarded like an HTTP request, so that the
        socket survives the loss of a model.
        """
        if self.is_stopping:
            await send(
                {
                    "type": "websocket.close",
                    "code": RESTART_CLOSE_CODE,
                    "reason": "the server is stopping",
                }
            )
            return
        socket = WebSocket(scope, receive, send)
        try:
            self._guard.check_request("websocket", "GET", socket.headers)
        except ApiError as error:
            await socket.close(1008, str(error)[:120])
            return
        if scope["path"] != SOCKET_PATH or not api_keys.is_allowed(
            socket.headers, self.settings.keys
        ):
            await socket.close(
                1008,
                "this server needs a key"
                if scope["path"] == SOCKET_PATH
                else "this path does not exist",
            )
            return
        await socket.accept()
        await SocketSession(
            socket,
            partial(self.forwarded_documents, portable_scope(scope)),
            partial(self._end_thinking, portable_scope(scope)),
            self.socket_answers,
            self.body_budget,
        ).run()

    async def _end_thinking(self, scope: dict[str, Any], response_id: str) -> bool:
        """End the thinking of a running response of a WebSocket's client, and return whether it was
        thinking. `scope`: the WebSocket's.
        """
        body = {"id": response_id, "action": END_THINKING}
        try:
            async with aclosing(self.forwarded_documents(scope, CONTROL_PATHS[0], body)) as answers:
                return any([answer["success"] async for answer in answers])
        except ApiError:  # the answer has ended
            return False

    async def forwarded_documents(
        self, scope: dict[str, Any], path: str, body: Mapping[str, Any]
    ) -> AsyncGenerator[dict[str, Any], None]:
        """Forward a request that did not come over HTTP, and yield the JSON objects of its answer.
        `scope`: that of the WebSocket or the gRPC call. Raises ApiError.
        """
        documents = AnswerDocuments()
        task = asyncio.ensure_future(
            self._forward(post_scope(scope, path), encode_json(body), documents.send)
        )
        task.add_done_callback(documents.close)
        try:
            while (document := await documents.queue.get()) is not None:
                yield document
            await task
            documents.raise_error()
        finally:
            task.cancel()


def call_scope(
    settings: ServerSettings, address: str, headers: Mapping[str, str]
) -> dict[str, Any]:
    """Return the scope of a call that did not come over HTTP. `address`: that of the client;
    `headers`: besides the host.
    """
    headers = {"host": f"{settings.host}:{settings.port}", **headers}
    return {
        "http_version": "1.1",
        "root_path": "",
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
        "client": (address, 0),
        "server": (settings.host, settings.port),
    }


def post_scope(scope: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Return the scope of a POST request for `path` that did not come over HTTP. `scope`: that of
    the WebSocket or the call.
    """
    headers = [
        (name, value) for name, value in scope["headers"] if name.lower() in INHERITED_HEADERS
    ]
    return {
        **scope,
        "type": "http",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": [*headers, (b"content-type", b"application/json")],
    }


def error_response(error: ApiError, path: str) -> Response:
    """Return the response to a request for `path` that failed before a model has answered."""
    headers = None
    if error.status in (429, 503):
        headers = {"retry-after": str(RETRY_AFTER_SECONDS)}
    elif error.status == 401:
        headers = KEY_HEADERS
    return json_response(error_document(error, path), error.status, headers)


async def prefix_key_of_body(raw: bytes) -> bytes:
    """Return prefix_key() of a request's body; b"" if the body is no JSON object, which the model's
    process refuses.
    """
    try:
        return prefix_key(await parse_json(raw)) if raw else b""
    except ApiError:
        return b""


class _SentAnswer:
    """The response that the client has received so far. `send`: the ASGI send function to the
    client. `form`: the class of the API form; None if the path has none.

    - `has_begun`: the head was sent.
    - `has_answer`: more than reports of its progress was sent.
    - `is_complete`: the last byte was sent.
    - `position`: from where another model can continue the response (stream_resume.py); None if it
      cannot be continued.
    """

    def __init__(self, send: Send, form: type[ApiForm] | None) -> None:
        self._send, self._form = send, form
        self.has_begun = self.has_answer = self.is_complete = False
        self.position: StreamPosition | None = new_position()

    async def send(self, message: Message) -> None:
        """Forward an ASGI message from a model's process to the client.

        If another process takes over an answer whose beginning was already sent, it must continue
        the stream. Raises UpstreamBusy if it refuses with status 429, and UpstreamLost if it starts
        any other new response.
        """
        marks, is_progress = message.get(MARKS_KEY), message.get(PROGRESS_KEY, False)
        message = {
            name: value for name, value in message.items() if name not in (MARKS_KEY, PROGRESS_KEY)
        }
        self.has_answer = self.has_answer or not is_progress
        is_head = message["type"] == "http.response.start"
        if is_head and self.has_begun:
            if marks is None:
                raise UpstreamBusy if message["status"] == 429 else UpstreamLost
            return
        if marks is None:
            self.position = None
        elif self.position:
            self.position.advance(marks)
        if is_head:
            content_types = [
                value for name, value in message["headers"] if name.lower() == b"content-type"
            ]
            # Only a stream can end with an error event.
            if self._form and not any(
                kind.startswith(self._form.media_type.encode()) for kind in content_types
            ):
                self._form = None
        elif message["type"] == "http.response.body":
            self.is_complete = not message.get("more_body")
        self.has_begun = True
        await self._send(message)

    async def send_break(self) -> None:
        """Send an error event that ends the stream. Any other response ends without its last bytes,
        which the client detects by its length.
        """
        await self.send_error(
            ApiError("the model was lost during this answer; try again", 503, code="model_lost")
        )

    async def send_error(self, error: ApiError) -> None:
        """Send an error event that ends the stream, as send_break()."""
        if self.is_complete or self._form is None:
            return
        await self._send(
            {
                "type": "http.response.body",
                "body": self._form.encode_error(error),
                "more_body": False,
            }
        )
