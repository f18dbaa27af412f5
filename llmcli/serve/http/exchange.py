"""Reads request bodies, and writes the answers of a form as HTTP responses.

A client's disconnect is detected even while nothing is sent to the client.
"""

import asyncio
from collections.abc import AsyncIterator, Coroutine, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from llmcli.api.errors import ApiError, as_api_error
from llmcli.api.forms import FORMS
from llmcli.api.forms.base import ApiForm, encode_json
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
from llmcli.serve.http import api_keys
from llmcli.serve.http.service import Service
from llmcli.strict_json import parse_strict_json
from llmcli.types import Event
from quant.errors import UserError

T = TypeVar("T")
TOO_DEEP = "the body is nested too deeply"
CLIENT_SECONDS = (
    60  # seconds that a client may take to send its body, or to read a piece of its answer
)
PING_SECONDS = 15.0  # seconds of silence after which a stream sends a ping
SHORT_BODY_BYTES = 4096  # up to this size of a body, its prompt is built on the event loop
MAX_READ_FACTOR = 8  # a body that is too large is read up to this many times the limit


class ClientDisconnected(Exception):
    """The client has closed its connection."""


async def read_body(request: Request, max_bytes: int) -> dict[str, Any]:
    """Return the JSON object in a request's body. Raises ApiError if the body is not a JSON object
    or is too large.
    """
    return parse_json(await read_all(request, max_bytes))


async def read_all(request: Request, max_bytes: int) -> bytes:
    """Return the bytes of a request's body. Raises ApiError if the body is too large or arrives too
    slowly, ClientDisconnected if the client disconnects.
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
    # A body that is too large is still read up to a multiple of the limit, because many clients
    # read the response only after they have sent everything.
    if count > max_bytes:
        raise ApiError(f"the body is larger than this server's limit of {max_bytes:,} bytes", 413)
    return bytes(raw)


def parse_json(raw: bytes) -> dict[str, Any]:
    """Parse bytes as a JSON object. Raises ApiError if they are not one."""
    try:
        document = parse_strict_json(raw)
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
    """Build the form of a path from a request's document and compile its constraint. This happens
    in worker threads; if the request `is_short`, its form may be built on the event loop.
    """
    form: ApiForm = await bridge.run_in_worker(
        FORMS[path], document, bridge.runner, settings, is_short=is_short
    )
    if form.constraint:
        await bridge.run_in_worker(form.compile_constraint, kind="grammars")
    return form


async def respond(service: Service, request: Request, form: ApiForm) -> Response:
    """Submit the requests of a form and respond: with one document at the end, or with a stream
    that begins at the first event.
    """
    address = request.client.host if request.client else ""
    client = api_keys.client_id(request.headers, address, service.settings.keys)
    position = read_position(request.scope) if form.is_stream else None
    if position:
        form.resume(position)
    requests = [replace(form_request, client=client) for form_request in form.requests]
    answering = service.bridge.answer(*requests, samples=form.n_samples)
    if form.is_stream:
        return EventStreamResponse(answering, form, position)
    async with aclosing(answering):
        await cancel_on_disconnect(request.receive, _read_to_end(answering))
    return json_response(form.document(answering.answers))


async def _read_to_end(answering: PendingAnswers) -> None:
    async for _ in answering:
        pass


async def cancel_on_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine and return its result. If the client disconnects first, cancel the coroutine
    and raise ClientDisconnected.
    """
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_wait_for_disconnect(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnected
    finally:
        for future in (task, gone):
            future.cancel()
        with suppress(asyncio.CancelledError):
            await task if not task.done() else None


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def json_response(
    document: Any, status: int = 200, headers: dict[str, str] | None = None
) -> Response:
    """Return a document as a JSON response."""
    return Response(encode_json(document), status, headers, "application/json")


@dataclass(frozen=True, slots=True)
class StreamPiece:
    """Bytes of a stream, the marks of the events in them, and whether more bytes follow."""

    raw: bytes
    marks: tuple[StreamMark, ...] = ()
    more: bool = True


class EventStreamResponse(Response):
    """A stream of Server-Sent Events. The response head is sent with the first event, so that an
    error before it can have its own status.

    If the request continues a stream at a `position`, events that were already sent are skipped,
    and each piece carries the marks of its events (stream_resume.py).
    """

    def __init__(
        self, answering: PendingAnswers, form: ApiForm, position: StreamPosition | None = None
    ) -> None:
        self.answering, self.form, self.position = answering, form, position
        self.media_type = form.media_type
        self.status_code, self.background = 200, None
        self._has_started, self._sent_at = False, 0.0
        self.init_headers({"cache-control": "no-store", "x-accel-buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send events as they arrive. If the client disconnects, cancel the answers."""
        async with aclosing(self.answering):
            with suppress(ClientDisconnected):
                await cancel_on_disconnect(receive, self._send(send))

    async def _send(self, send: Send) -> None:
        pinging = asyncio.ensure_future(self._ping(send))
        try:
            async for piece in self._chunks():
                if not piece.more:
                    pinging.cancel()
                await self._send_chunk(send, piece)
        except TimeoutError:  # the client does not read
            raise ClientDisconnected from None
        finally:
            pinging.cancel()

    async def _send_chunk(self, send: Send, piece: StreamPiece) -> None:
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
        """Yield the events as bytes. Events that arrive together are sent as one piece. For a
        single answer, the last event is sent together with the end of the stream.
        """
        form, held, events, past = self.form, bytearray(), list[Event](), PastAnswer(self.position)
        try:
            async for event in self.answering:
                if not form.has_started:
                    head = form.encode_chunks(form.stream_start())
                    held += b"" if past.has_started else head
                raw = form.encode_event(event)
                if past.includes(event):
                    continue
                held += raw
                events.append(event)
                last = event.finish is not None and self.answering.n_answers == 1
                if held and not self.answering.has_unread_events and not last:
                    yield StreamPiece(bytes(held), stream_marks(events))
                    held.clear()
                    events.clear()
            held += form.encode_chunks(form.stream_end(self.answering.answers)) + form.end_marker
            yield StreamPiece(bytes(held), stream_marks(events), more=False)
        except UserError as error:
            if not self._has_started and not form.has_started:
                raise
            yield StreamPiece(form.encode_error(as_api_error(error)), more=False)
