"""The transport of a server at a URL: MCP's streamable HTTP, with limits for the size of answers.

Connections are direct, without a proxy, and redirects to other hosts are not followed.
"""

import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from http import HTTPStatus

import anyio
import httpx2
from mcp.client.streamable_http import streamable_http_client
from mcp_types import INTERNAL_ERROR

from llmcli.tool_servers.limits import MAX_MESSAGE_BYTES, ToolLimits
from llmcli.tool_servers.protocol.channel import Channel, ChannelError
from llmcli.tool_servers.protocol.stdio_transport import Streams
from llmcli.tool_servers.server_file import ToolServer
from llmcli.tool_servers.tool_result import clean_text

CONNECT_SECONDS = 10.0
CLOSE_SECONDS = 2.0
NOTIFICATION_SECONDS = 5.0  # for a message without an answer, behind which the next ones wait
SESSION_PATTERN = re.compile("[!-~]{1,1024}")
KEPT_HEADERS = {"content-type", "location", "mcp-session-id"}


class BoundedBody(httpx2.AsyncByteStream):
    """The body of an answer, counted by a channel. Raises httpx2.ReadError if it is too long, and
    httpx2.ReadTimeout if it has not ended at `deadline`, a time of anyio's clock.
    """

    def __init__(self, body: httpx2.AsyncByteStream, channel: Channel, deadline: float) -> None:
        self._body, self._channel, self._deadline = body, channel, deadline

    async def __aiter__(self) -> AsyncIterator[bytes]:
        pieces = aiter(self._body)
        while (piece := await self._read_piece(pieces)) is not None:
            try:
                self._channel.count_bytes(len(piece))
            except ChannelError as error:
                self._channel.end(str(error))
                raise httpx2.ReadError(str(error)) from None
            yield piece

    async def aclose(self) -> None:
        await self._body.aclose()

    async def _read_piece(self, pieces: AsyncIterator[bytes]) -> bytes | None:
        """Return the next piece, or None at the end. Raises httpx2.ReadTimeout."""
        try:
            # the timeout of httpx2 restarts with each piece, so that a trickle would not end
            with anyio.fail_after(max(0.0, self._deadline - anyio.current_time())):
                return await anext(pieces, None)
        except TimeoutError:
            raise httpx2.ReadTimeout("its answer has not ended in time") from None


class CheckedTransport(httpx2.AsyncBaseTransport):
    """Sends requests, and checks their answers before the package `mcp` reads them.

    A failure becomes the answer 502 with a JSON-RPC error, because an exception would end the
    connection, and not only the call. An answer must have ended after `longest` seconds, when no
    caller waits for it any more.
    """

    def __init__(self, channel: Channel, longest: float) -> None:
        self._channel, self._longest = channel, longest
        self._inner = httpx2.AsyncHTTPTransport()

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        if request.method == "GET":
            if "last-event-id" not in request.headers:
                # a stream of messages between calls, none of which would be used
                return httpx2.Response(HTTPStatus.METHOD_NOT_ALLOWED)
            try:
                self._channel.count_resumption()
            except ChannelError as error:
                self._channel.end(str(error))
                return _answer_error(HTTPStatus.BAD_GATEWAY, str(error))
        await request.aread()  # a redirected request has its body as a stream
        own_seconds = _own_seconds(request)
        seconds = self._longest if own_seconds is None else own_seconds
        try:
            with anyio.fail_after(seconds):
                return await self._send(request, anyio.current_time() + seconds)
        except TimeoutError:
            return _answer_error(HTTPStatus.BAD_GATEWAY, f"no answer within {seconds:g} s")
        except httpx2.RequestError as error:
            return _answer_error(HTTPStatus.BAD_GATEWAY, str(error) or type(error).__name__)

    async def aclose(self) -> None:
        await self._inner.aclose()

    async def _send(self, request: httpx2.Request, deadline: float) -> httpx2.Response:
        """Send a request, and return its answer: events as a stream until `deadline`, JSON
        completely, and nothing of other bodies. Raises httpx2.RequestError.
        """
        response = await self._inner.handle_async_request(request)
        assert isinstance(response.stream, httpx2.AsyncByteStream)
        body = BoundedBody(response.stream, self._channel, deadline)
        kind = response.headers.get("content-type", "").partition(";")[0].strip().lower()
        is_events = kind == "text/event-stream" and response.is_success
        is_returned = False
        try:
            _check_head(request, response)
            # a stream to which no call waits would be read without a limit
            if is_events and _own_seconds(request) is None:
                response.stream = body
                is_returned = True
                return response
            content = await _read_message(body) if kind == "application/json" else b""
        finally:
            if not is_returned:
                await body.aclose()
        if response.is_error:
            status = f"HTTP status {response.status_code} {response.reason_phrase}".strip()
            return _answer_error(response.status_code, _read_error(content) or status)
        headers = {name: response.headers[name] for name in KEPT_HEADERS & response.headers.keys()}
        return httpx2.Response(response.status_code, headers=headers, content=content)


def _own_seconds(request: httpx2.Request) -> float | None:
    """Return the time limit of a request that no call waits for; None for other requests, whose
    callers have limits.
    """
    if request.method == "DELETE":
        return CLOSE_SECONDS
    if request.method != "POST" or {"method", "id"} <= json.loads(request.content).keys():
        return None
    return NOTIFICATION_SECONDS


def _check_head(request: httpx2.Request, response: httpx2.Response) -> None:
    """Raise httpx2.DecodingError for headers that the package `mcp` or httpx2 cannot use. Compressed
    bodies are refused, because a few bytes of them can become many.
    """
    if response.headers.get("content-encoding", "identity") != "identity":
        raise httpx2.DecodingError("its answer is compressed, which was not asked for")
    if not SESSION_PATTERN.fullmatch(response.headers.get("mcp-session-id", "none")):
        raise httpx2.DecodingError("its session has a name that is no short ASCII text")
    try:
        request.url.join(response.headers.get("location", ""))
    except (httpx2.InvalidURL, ValueError):
        raise httpx2.DecodingError("it redirects to an invalid address") from None


async def _read_message(body: BoundedBody) -> bytes:
    """Return the body of an answer. Raises httpx2.RequestError."""
    content = bytearray()
    async for piece in body:
        content += piece
        if len(content) > MAX_MESSAGE_BYTES:
            raise httpx2.ReadError(f"it sent a message of more than {MAX_MESSAGE_BYTES >> 20} MiB")
    return bytes(content)


def _read_error(content: bytes) -> str:
    """Return the text of the JSON-RPC error in a body, or "" if it has none."""
    try:
        message = json.loads(content)["error"]["message"]
    except (ValueError, LookupError, TypeError, RecursionError):
        return ""
    return message if isinstance(message, str) else ""


def _answer_error(status: int, text: str) -> httpx2.Response:
    """Return an answer of HTTP with a JSON-RPC error, which the package `mcp` gives to the caller."""
    error = {"code": INTERNAL_ERROR, "message": clean_text(text)}
    return httpx2.Response(status, json={"jsonrpc": "2.0", "id": None, "error": error})


@asynccontextmanager
async def open_url(
    server: ToolServer, channel: Channel, limits: ToolLimits
) -> AsyncIterator[Streams]:
    """Connect to the URL of `server`, and end the session after the block. Yields the streams of
    messages.
    """
    longest = max(limits.call_seconds, limits.start_seconds) + CLOSE_SECONDS
    timeout = httpx2.Timeout(CONNECT_SECONDS, read=longest)
    client = httpx2.AsyncClient(
        headers={**server.headers, "accept-encoding": "identity"},
        timeout=timeout,
        transport=CheckedTransport(channel, longest),
        trust_env=False,
    )
    async with (
        client,
        streamable_http_client(
            server.url, http_client=client, max_sse_event_size=MAX_MESSAGE_BYTES
        ) as streams,
    ):
        yield streams
