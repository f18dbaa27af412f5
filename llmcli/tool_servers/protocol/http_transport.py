"""The transport of a server at a URL: MCP's streamable HTTP, with limits for the size of answers.

Connections are direct, without a proxy, and redirects to other hosts are not followed.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx2
from mcp.client.streamable_http import streamable_http_client

from llmcli.tool_servers.limits import MAX_MESSAGE_BYTES, ToolLimits
from llmcli.tool_servers.protocol.channel import Channel, ChannelError
from llmcli.tool_servers.protocol.stdio_transport import Streams
from llmcli.tool_servers.server_file import ToolServer

CONNECT_SECONDS = 10.0
CLOSE_SECONDS = 2.0


class BoundedBody(httpx2.AsyncByteStream):
    """The body of an answer, counted by a channel. Raises httpx2.ReadError if it is too long."""

    def __init__(self, body: httpx2.AsyncByteStream, channel: Channel) -> None:
        self._body, self._channel = body, channel

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for piece in self._body:
            try:
                self._channel.count_bytes(len(piece))
            except ChannelError as error:
                self._channel.end(str(error))
                raise httpx2.ReadError(str(error)) from None
            yield piece

    async def aclose(self) -> None:
        await self._body.aclose()


class BoundedTransport(httpx2.AsyncBaseTransport):
    """Sends requests, and bounds the bodies of their answers. Compressed bodies are refused,
    because a few bytes of them can become many.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel, self._inner = channel, httpx2.AsyncHTTPTransport()

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        response = await self._inner.handle_async_request(request)
        if response.headers.get("content-encoding", "identity") != "identity":
            await response.aclose()
            raise httpx2.DecodingError("its answer is compressed, which was not asked for")
        assert isinstance(response.stream, httpx2.AsyncByteStream)
        response.stream = BoundedBody(response.stream, self._channel)
        return response

    async def aclose(self) -> None:
        await self._inner.aclose()


@asynccontextmanager
async def open_url(
    server: ToolServer, channel: Channel, limits: ToolLimits
) -> AsyncIterator[Streams]:
    """Connect to the URL of `server`, and end the session after the block. Yields the streams of
    messages.
    """
    timeout = httpx2.Timeout(CONNECT_SECONDS, read=max(limits.call_seconds, limits.start_seconds))
    client = httpx2.AsyncClient(
        headers={**server.headers, "accept-encoding": "identity"},
        timeout=timeout,
        transport=BoundedTransport(channel),
        trust_env=False,
    )
    async with (
        client,
        streamable_http_client(
            server.url, http_client=client, max_sse_event_size=MAX_MESSAGE_BYTES
        ) as streams,
    ):
        try:
            yield streams
        finally:
            # the request that ends the session must not wait for a server that hangs
            client.timeout = httpx2.Timeout(CLOSE_SECONDS)
