"""Reads the bodies of HTTP requests, and sends the responses of API forms (api/forms/base.py).

A client's disconnect is detected even while nothing is sent to the client, so that its answers are
canceled at once.
"""

import asyncio
from collections.abc import AsyncIterator, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from llmcli.api.bodies import checks
from llmcli.api.bodies.base import RequestBody
from llmcli.api.errors import ApiError, as_api_error
from llmcli.api.forms import FORMS
from llmcli.api.forms.base import ApiForm, encode_json
from llmcli.api.json_pieces import (
    PIECE_CHARACTERS,
    TooManyValues,
    encode_in_pieces,
    parse_in_pieces,
)
from llmcli.api.server_settings import ServerSettings
from llmcli.api.stream_resume import (
    MARKS_KEY,
    PastAnswer,
    StreamMark,
    StreamPosition,
    read_position,
    stream_marks,
)
from llmcli.serve.engine_thread.bridge import EngineBridge, PendingAnswers
from llmcli.serve.engine_thread.bug_log import log_bug
from llmcli.serve.engine_thread.client_requests import client_requests
from llmcli.serve.engine_thread.document_stream import answer_in_background
from llmcli.serve.http import api_keys
from llmcli.serve.http.service import Service
from llmcli.strict_json import parse_strict_json
from llmcli.types import Event

T = TypeVar("T")
BodyT = TypeVar("BodyT", bound=RequestBody)
TOO_DEEP = "the body is nested too deeply"
CLIENT_SECONDS = 60  # time for a client to send a body, or to read one piece of a stream
# key of the ASGI scope of a request that is a line of a batch; clients cannot set it
BACKGROUND_KEY = "llmcli.background"
PING_SECONDS = 15.0  # seconds of silence after which a stream sends a ping
SHORT_BODY_BYTES = 4096  # up to this size of a body, its prompt is built on the event loop
WORKER = ThreadPoolExecutor(1, "llmcli-bodies")  # parses and writes large bodies
MAX_READ_FACTOR = 8  # a body that is too large is read up to this many times the limit


class ClientDisconnected(Exception):
    """The client has closed its connection."""


async def read_body(request: Request, max_bytes: int) -> dict[str, Any]:
    """Return the JSON object in a request's body. Raises ApiError if the body is not a JSON object,
    and the errors of read_all().
    """
    return await parse_json(await read_all(request, max_bytes))


async def read_checked_body(
    request: Request, max_bytes: int, body_type: type[BodyT], notes: list[str] | None = None
) -> BodyT:
    """Return the JSON object in a request's body as its model. Notes about fields without effect
    are appended to `notes`. Raises ApiError if the object does not fit the model, and the errors of
    read_body().
    """
    document = await read_body(request, max_bytes)
    return checks.read_body(body_type, document, [] if notes is None else notes, request.url.path)


async def read_all(request: Request, max_bytes: int) -> bytes:
    """Return the bytes of a request's body. Raises ApiError if the body is too large or arrives too
    slowly, and ClientDisconnected.
    """
    if (coding := request.headers.get("content-encoding", "identity")) != "identity":
        raise ApiError(f"the body has the encoding {coding[:60]!r}; send it without one", 415)
    raw, count = bytearray(), 0
    try:
        async with asyncio.timeout(CLIENT_SECONDS):
            async for chunk in request.stream():
                count += len(chunk)
                if count <= max_bytes:
                    raw += chunk
                elif count > MAX_READ_FACTOR * max_bytes:
                    break
    except TimeoutError:
        raise ApiError(f"the body did not arrive within {CLIENT_SECONDS} s", 408) from None
    except ClientDisconnect:
        raise ClientDisconnected from None
    # A body that is too large is read further, because many clients read the response only after
    # they have sent everything.
    if count > max_bytes:
        raise ApiError(f"the body is larger than this server's limit of {max_bytes:,} bytes", 413)
    return bytes(raw)


async def parse_json(raw: bytes) -> dict[str, Any]:
    """Parse the bytes of a body as a JSON object. A large body is parsed on a worker thread, so that
    running streams do not wait for it. Raises ApiError if the bytes are not a JSON object.
    """
    try:
        document = (
            parse_strict_json(raw)
            if len(raw) <= PIECE_CHARACTERS
            else await asyncio.get_running_loop().run_in_executor(WORKER, parse_in_pieces, raw)
        )
    except TooManyValues as error:
        raise ApiError(f"the body is too large: {error}", 413) from None
    except UnicodeDecodeError as error:
        raise ApiError(f"the body is not UTF-8 at byte {error.start}") from None
    except RecursionError:
        raise ApiError(TOO_DEEP) from None
    except ValueError as error:
        raise ApiError(f"the body is not JSON: {error}") from None
    if not isinstance(document, dict):
        raise ApiError("the body must be a JSON object")
    return document


async def build_form(
    bridge: EngineBridge,
    path: str,
    document: Mapping[str, Any],
    settings: ServerSettings,
    is_short: bool = False,
) -> ApiForm:
    """Build the API form with this path for a request's JSON object, and compile its constraint.
    Both run in worker threads. If the request `is_short`, the form may be built on the event loop
    instead, because switching threads takes longer. Raises ApiError or UserError for an invalid
    request.
    """
    form: ApiForm = await bridge.run_in_worker(
        FORMS[path], document, bridge.runner, settings, is_short=is_short
    )
    bridge.log.write_once(*form.log_notes)
    if form.constraint:
        await bridge.run_in_worker(form.compile_constraint, kind="grammars")
    return form


async def respond(service: Service, request: Request, form: ApiForm) -> Response:
    """Submit the requests of a form to the engine. Return a response with one JSON object, sent at
    the end, or a streaming response, which begins with the first event. If the request continues an
    interrupted stream, the stream is resumed at its position (stream_resume.py).
    """
    client = api_keys.connected_client(request, service.settings.keys)
    position = read_position(request.scope) if form.is_stream else None
    if position:
        form.resume(position)
    if request.scope.get(BACKGROUND_KEY):
        work = answer_in_background(service.bridge, form, client)
        return json_response(await cancel_on_disconnect(request.receive, work))
    requests = client_requests(form, client, service.settings)
    pending = service.bridge.answer(*requests, samples=form.n_samples)
    service.bridge.named[form.id] = pending
    if form.is_stream:
        return EventStreamResponse(pending, form, position)
    async with aclosing(pending):
        await cancel_on_disconnect(request.receive, _read_to_end(pending))
    return json_response(form.complete_document(pending.answers))


async def _read_to_end(pending: PendingAnswers) -> None:
    """Read all events of the answers, so that `pending.answers` is available."""
    async for _ in pending:
        pass


async def cancel_on_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine and return its result. If the client disconnects first, cancel the coroutine
    and raise ClientDisconnected. `receive`: the request's ASGI receive function.
    """
    task, disconnect = (
        asyncio.ensure_future(work),
        asyncio.ensure_future(_wait_for_disconnect(receive)),
    )
    try:
        await asyncio.wait((task, disconnect), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnected
    finally:
        for future in (task, disconnect):
            future.cancel()
        with suppress(asyncio.CancelledError):
            await task if not task.done() else None


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def json_response(
    document: Any, status: int = 200, headers: dict[str, str] | None = None
) -> Response:
    """Return a response with a value as JSON."""
    return Response(encode_json(document), status, headers, "application/json")


async def large_json_response(document: Any) -> Response:
    """Return a response with a value as JSON, which is written on a worker thread, so that running
    streams do not wait for it. It is for values with many numbers.
    """
    loop = asyncio.get_running_loop()
    raw = await loop.run_in_executor(WORKER, encode_in_pieces, document)
    return Response(raw, media_type="application/json")


@dataclass(frozen=True, slots=True)
class StreamPiece:
    """Bytes of a stream that are sent together. `marks`: which events they contain
    (stream_resume.py). `more`: whether more bytes follow.
    """

    raw: bytes
    marks: tuple[StreamMark, ...] = ()
    more: bool = True


class EventStreamResponse(Response):
    """A stream of Server-Sent Events with the answers of a form. The response's head is sent with
    the first event, so that an error before it can still have a different status.

    If the request continues a stream (`position` is not None), the events that the client already
    has are skipped, and each ASGI message lists its events under MARKS_KEY.
    """

    def __init__(
        self, pending: PendingAnswers, form: ApiForm, position: StreamPosition | None = None
    ) -> None:
        self.pending, self.form, self.position = pending, form, position
        self.media_type = form.media_type
        self.status_code, self.background = 200, None
        self._has_started, self._sent_at = False, 0.0
        self.init_headers({"cache-control": "no-store", "x-accel-buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events as they arrive. If the client disconnects, cancel the answers."""
        async with aclosing(self.pending):
            with suppress(ClientDisconnected):
                await cancel_on_disconnect(receive, self._send(send))

    async def _send(self, send: Send) -> None:
        """Send the stream, and pings while it is silent. Raises ClientDisconnected if the client
        does not read.
        """
        ping_task = asyncio.ensure_future(self._ping(send))
        try:
            async for piece in self._chunks():
                if not piece.more:
                    ping_task.cancel()
                await self._send_chunk(send, piece)
        except TimeoutError:  # the client does not read
            raise ClientDisconnected from None
        finally:
            ping_task.cancel()

    async def _send_chunk(self, send: Send, piece: StreamPiece) -> None:
        """Send a piece of the stream, after the response's head if it is the first. Raises
        TimeoutError if the client does not read it in time.
        """
        self._sent_at = asyncio.get_running_loop().time()
        if not self._has_started:
            self._has_started = True
            head = {MARKS_KEY: ()} if self.position else {}
            await send(
                {"type": "http.response.start", "status": 200, "headers": self.raw_headers, **head}
            )
        marks = {MARKS_KEY: piece.marks} if self.position else {}
        async with asyncio.timeout(CLIENT_SECONDS):
            await send(
                {"type": "http.response.body", "body": piece.raw, "more_body": piece.more, **marks}
            )

    async def _ping(self, send: Send) -> None:
        """Send a ping after each PING_SECONDS without data, because proxies close connections that
        are silent for long.
        """
        loop = asyncio.get_running_loop()
        self._sent_at = loop.time()
        with suppress(TimeoutError):  # _send reports the same timeout
            while self.form.ping:
                await asyncio.sleep(max(0.0, self._sent_at + PING_SECONDS - loop.time()))
                if loop.time() >= self._sent_at + PING_SECONDS:
                    await self._send_chunk(send, StreamPiece(self.form.ping))

    async def _chunks(self) -> AsyncIterator[StreamPiece]:
        """Yield the stream in pieces. Events that arrive together are in one piece. If there is a
        single answer, its last event is in one piece with the end of the stream.
        """
        form, buffer, events, past_answer = (
            self.form,
            bytearray(),
            list[Event](),
            PastAnswer(self.position),
        )
        try:
            async for event in self.pending:
                if not form.has_started:
                    head = form.encode_chunks(form.stream_start())
                    buffer += b"" if past_answer.has_started else head
                raw = form.encode_event(event)
                if past_answer.includes(event):
                    continue
                buffer += raw
                events.append(event)
                is_last_event = event.finish is not None and self.pending.n_answers == 1
                if buffer and not self.pending.has_unread_events and not is_last_event:
                    yield StreamPiece(bytes(buffer), stream_marks(events))
                    buffer.clear()
                    events.clear()
            buffer += form.encode_chunks(form.final_chunks(self.pending.answers)) + form.end_marker
            yield StreamPiece(bytes(buffer), stream_marks(events), more=False)
        except Exception as error:
            if not self._has_started and not form.has_started:
                raise
            log_bug(error)
            yield StreamPiece(form.encode_error(as_api_error(error)), more=False)
