"""From a form and the bridge to an HTTP response; whoever goes away is noticed while nothing is said, too."""

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
from llmcli.serve.known import TOLD, Known, known
from llmcli.serve.problems import Problem, problem
from llmcli.serve.routes.base import Service
from llmcli.serve.schema.base import Form, encoded
from llmcli.serve.settings import Settings
from llmcli.strict import strict
from llmcli.types import Event
from quant.errors import Refusal

T = TypeVar("T")
DEEP = "the body is nested too deeply"
PATIENCE = 60  # seconds that a client may take for its body, or leave an answer unread
PING = 15.0  # seconds without a word, after which a stream says that it is alive
SHORT = 4096  # bytes of a body whose prompt is made at once
READ = 8  # times as much as is taken is read of a body that is too large


class Gone(Exception):
    """The client has closed its connection: nobody is left to answer."""


async def body(request: Request, most: int) -> dict[str, Any]:
    """The JSON object of a request; raises Problem where it is too large, no JSON, or something else."""
    return parsed(await whole(request, most))


async def whole(request: Request, most: int) -> bytes:
    """All bytes of a request's body; raises Problem where they are too many or too slow, Gone where they end early."""
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
    if count > most:  # read to its end where that is near: many clients listen only then
        raise Problem(f"the body is larger than {most:,} bytes, which is what this server takes", 413)
    return bytes(raw)


def parsed(raw: bytes) -> dict[str, Any]:
    """The JSON object that bytes are; raises Problem where they are none."""
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
    """A request's document as the form of its path, ready to be asked; all of it is made beside the engine."""
    form: Form = await bridge.prepare(registry.forms()[path], document, bridge.runner, settings, short=short)
    if form.constraint:
        await bridge.prepare(form.ready, kind="grammars")
    return form


async def answered(service: Service, request: Request, form: Form) -> Response:
    """The form's answer: a document when it is there, or a stream from the first event on."""
    address = request.client.host if request.client else ""
    client = keys.client(request.headers, address, service.settings.keys)
    before = known(request.scope) if form.stream and form.continues else None
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
    """What `work` returns; raises Gone, with the work cancelled, when the client goes first."""
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
    """Bytes of a stream; how many of the answer's events they tell, and the tokens of these; whether more follows."""

    raw: bytes
    events: int = 0
    tokens: tuple[int, ...] = ()
    more: bool = True


class Events(Response):
    """Server-Sent Events: the head goes out with the first of them, so that what fails before has its status.

    Where something is `known` of the answer, its events are passed over, and each piece says what it tells (known.py).
    """

    def __init__(self, answering: Answering, form: Form, known: Known | None = None) -> None:
        self.answering, self.form, self.known = answering, form, known
        self.media_type = form.media_type
        self.status_code, self.background = 200, None
        self._begun, self._spoke = False, 0.0
        self.init_headers({"cache-control": "no-store", "x-accel-buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send while they come; stop the engine's work when the client goes."""
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
        except TimeoutError:  # it reads nothing: its answer is of no use to anybody
            raise Gone from None
        finally:
            pinging.cancel()

    async def _put(self, send: Send, piece: Piece) -> None:
        self._spoke = asyncio.get_running_loop().time()
        if not self._begun:
            self._begun = True
            head = {TOLD: (0, ())} if self.known else {}
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers, **head})
        told = {TOLD: (piece.events, piece.tokens)} if self.known else {}
        async with asyncio.timeout(PATIENCE):
            await send({"type": "http.response.body", "body": piece.raw, "more_body": piece.more, **told})

    async def _ping(self, send: Send) -> None:
        """A comment now and then, so that nobody between here and there takes a long wait for an end."""
        loop = asyncio.get_running_loop()
        self._spoke = loop.time()
        with suppress(TimeoutError):  # _send finds the same
            while self.form.ping:
                await asyncio.sleep(max(0.0, self._spoke + PING - loop.time()))
                if loop.time() >= self._spoke + PING:
                    await self._put(send, Piece(self.form.ping))

    async def _written(self) -> AsyncIterator[Piece]:
        """The events as bytes: what has come together goes out together, and the last one with what closes."""
        form, held, told = self.form, bytearray(), list[Event]()
        past = self.known.events if self.known else 0
        try:
            async for event in self.answering:
                head = b"" if form.begun else form.written(form.begin())
                raw = head + form.streamed(event)
                if past:
                    past -= 1
                    continue
                held += raw
                told.append(event)
                last = event.finish is not None and self.answering.count == 1
                if held and not self.answering.waiting and not last:
                    yield Piece(bytes(held), len(told), _tokens(told))
                    held.clear()
                    told.clear()
            held += form.written(form.end(self.answering.answers)) + form.last
            yield Piece(bytes(held), len(told), _tokens(told), more=False)
        except Refusal as error:
            if not self._begun and not form.begun:
                raise
            yield Piece(form.failed(problem(error)), more=False)


def _tokens(events: list[Event]) -> tuple[int, ...]:
    return tuple(event.token.id for event in events if event.token)
