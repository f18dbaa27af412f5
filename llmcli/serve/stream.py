"""Reads request bodies, and turns a form and the bridge's events into an HTTP response.

A client that goes away is noticed even while nothing is being sent to it.
"""

import asyncio
from collections.abc import AsyncIterator, Coroutine, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from llmcli.serve import keys, registry
from llmcli.serve.bridge import Answering, Bridge
from llmcli.serve.known import TOLD, Known, Past, Told, known, told
from llmcli.serve.problems import Problem, problem
from llmcli.serve.routes.base import Service
from llmcli.serve.schema.base import Form, encoded
from llmcli.serve.settings import Settings
from llmcli.strict import strict
from llmcli.types import Event
from quant.errors import Refusal

T = TypeVar("T")
DEEP = "the body is nested too deeply"
PATIENCE = 60  # seconds that a client may take to send its body, or to read a piece of its answer
PING = 15.0  # seconds of silence after which a stream sends a sign of life
SHORT = 4096  # bytes of a body whose prompt is made on the event loop
READ = 8  # a body that is too large is read up to so many times the limit


class Gone(Exception):
    """The client has closed its connection: nobody is left to answer."""


async def body(request: Request, most: int) -> dict[str, Any]:
    """The JSON object in a request's body; raises Problem where there is none, or the body is too
    large.
    """
    return parsed(await whole(request, most))


async def whole(request: Request, most: int) -> bytes:
    """A request's body. Raises Problem where it is too large or too slow, Gone where the client
    leaves.
    """
    if (coding := request.headers.get("content-encoding", "identity")) != "identity":
        raise Problem(f"the body is coded as {coding[:60]!r}; send it as it is", 415)
    raw, count = bytearray(), 0
    try:
        async with asyncio.timeout(PATIENCE):
            async for part in request.stream():
                count += len(part)
                if count <= most:
                    raw += part
                elif count > READ * most:
                    break
    except TimeoutError:
        raise Problem(f"the body was not there within {PATIENCE} s", 408) from None
    except ClientDisconnect:
        raise Gone from None
    if (
        count > most
    ):  # most of it was read all the same: many clients listen only once they have sent everything
        raise Problem(
            f"the body is larger than {most:,} bytes, which is what this server takes", 413
        )
    return bytes(raw)


def parsed(raw: bytes) -> dict[str, Any]:
    """Bytes as a JSON object; raises Problem where they are none."""
    try:
        found = strict(raw)
    except UnicodeDecodeError as error:
        raise Problem(f"the body is not UTF-8 at byte {error.start}") from None
    except RecursionError:
        raise Problem(DEEP) from None
    except ValueError as error:
        raise Problem(f"the body is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise Problem("the body must be a JSON object")
    return found


async def asked(
    bridge: Bridge, path: str, document: Mapping[str, Any], settings: Settings, short: bool = False
) -> Form:
    """The form of a path for a request's document, ready to be answered; it is made beside the
    engine's thread.
    """
    form: Form = await bridge.prepare(
        registry.forms()[path], document, bridge.runner, settings, short=short
    )
    if form.constraint:
        await bridge.prepare(form.ready, kind="grammars")
    return form


async def answered(service: Service, request: Request, form: Form) -> Response:
    """The form's answer: a document when it is there, or a stream from the first event on."""
    address = request.client.host if request.client else ""
    client = keys.client(request.headers, address, service.settings.keys)
    before = known(request.scope) if form.stream else None
    if before:
        form.resume(before)
    requests = [replace(one, client=client) for one in form.requests]
    answering = service.bridge.answer(*requests, samples=form.each)
    if form.stream:
        return Events(answering, form, before)
    async with aclosing(answering):
        await unless_gone(request.receive, _finished(answering))
    return json_response(form.whole(answering.answers))


async def _finished(answering: Answering) -> None:
    async for _ in answering:
        pass


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """What `work` returns. Cancels it and raises Gone when the client goes first."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise Gone
    finally:
        for one in (task, gone):
            one.cancel()
        with suppress(asyncio.CancelledError):
            await task if not task.done() else None


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def json_response(found: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A document as JSON."""
    return Response(encoded(found), status, headers, "application/json")


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes of a stream; what of the answers they tell; whether more follows."""

    raw: bytes
    told: tuple[Told, ...] = ()
    more: bool = True


class Events(Response):
    """Server-Sent Events. The head goes out with the first event: an error before it still has its
    own status.

    Where something may be `known` of the answers it is passed over, and each piece says what it
    tells (known.py).
    """

    def __init__(self, answering: Answering, form: Form, known: Known | None = None) -> None:
        self.answering, self.form, self.known = answering, form, known
        self.media_type = form.media_type
        self.status_code, self.background = 200, None
        self._begun, self._spoke = False, 0.0
        self.init_headers({"cache-control": "no-store", "x-accel-buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send events as they come; when the client goes, the engine stops working on them."""
        async with aclosing(self.answering):
            with suppress(Gone):
                await unless_gone(receive, self._send(send))

    async def _send(self, send: Send) -> None:
        pinging = asyncio.ensure_future(self._ping(send))
        try:
            async for piece in self._written():
                if not piece.more:
                    pinging.cancel()
                await self._put(send, piece)
        except TimeoutError:  # the client reads nothing
            raise Gone from None
        finally:
            pinging.cancel()

    async def _put(self, send: Send, piece: Piece) -> None:
        self._spoke = asyncio.get_running_loop().time()
        if not self._begun:
            self._begun = True
            head = {TOLD: ()} if self.known else {}
            await send(
                {"type": "http.response.start", "status": 200, "headers": self.raw_headers, **head}
            )
        told = {TOLD: piece.told} if self.known else {}
        async with asyncio.timeout(PATIENCE):
            await send(
                {"type": "http.response.body", "body": piece.raw, "more_body": piece.more, **told}
            )

    async def _ping(self, send: Send) -> None:
        """Send a comment after each PING seconds of silence: proxies close connections that say
        nothing for long.
        """
        loop = asyncio.get_running_loop()
        self._spoke = loop.time()
        with suppress(TimeoutError):  # _send finds the same
            while self.form.ping:
                await asyncio.sleep(max(0.0, self._spoke + PING - loop.time()))
                if loop.time() >= self._spoke + PING:
                    await self._put(send, Piece(self.form.ping))

    async def _written(self) -> AsyncIterator[Piece]:
        """The events as bytes. Events that came together go out as one piece, the last one with the
        stream's end.
        """
        form, held, events, past = self.form, bytearray(), list[Event](), Past(self.known)
        try:
            async for event in self.answering:
                if not form.begun:
                    head = form.written(form.begin())
                    held += b"" if past.begun else head
                raw = form.streamed(event)
                if past.has(event):
                    continue
                held += raw
                events.append(event)
                last = event.finish is not None and self.answering.count == 1
                if held and not self.answering.waiting and not last:
                    yield Piece(bytes(held), told(events))
                    held.clear()
                    events.clear()
            held += form.written(form.end(self.answering.answers)) + form.last
            yield Piece(bytes(held), told(events), more=False)
        except Refusal as error:
            if not self._begun and not form.begun:
                raise
            yield Piece(form.failed(problem(error)), more=False)
