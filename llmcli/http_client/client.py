"""An HTTP client with a pool of connections, for responses that are JSON or an event stream.

Load tests use this client, so it must be much faster than the servers that they measure. It is
built on aiohttp because httpx uses several times the CPU time per request.
"""

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmcli.errors import UserError
from llmcli.http_client.openai_stream import read_error_message
from llmcli.http_client.sse import BadStreamError, parse_event

if TYPE_CHECKING:
    import aiohttp

MAX_BODY_BYTES = 1 << 22  # longer responses that are not streams are refused
MAX_ERROR_BYTES = 200  # an error response that is not JSON is cut to this length


class RequestError(Exception):
    """A failed request.

    `kind`: "timeout", "no connection", "broken off", "bad stream", or the HTTP status, such as
    "http 429". `message`: the error text of the server or of the operating system; it can be empty.
    """

    def __init__(self, kind: str, message: str = "") -> None:
        super().__init__(message or kind)
        self.kind, self.message = kind, message


class StatusError(RequestError):
    """The server responded with a status other than 200. `status` is its number."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"http {status}", message)
        self.status = status


class CertificateError(RequestError):
    """The server's certificate is not trusted."""


@dataclass(frozen=True, slots=True)
class ConnectionSettings:
    """How to connect to a server.

    `uses_tls`: the server's URL is https. `cacert`: a PEM file with the certificates to trust
    instead of the system's. `insecure`: accept any certificate. `timeout_seconds`: the time limit
    of a whole request, including its response.
    """

    uses_tls: bool
    api_key: str | None = None
    cacert: Path | None = None
    insecure: bool = False
    timeout_seconds: float = 600.0


class StreamResponse:
    """A response with status 200 whose body is still arriving."""

    def __init__(self, response: "aiohttp.ClientResponse") -> None:
        self._response = response

    def pieces(self) -> AsyncIterator[bytes]:
        """Yield the bytes of the body as they arrive; a piece can end in the middle of an event."""
        return self._response.content.iter_any()

    def close(self) -> None:
        """Close the connection. If the body is incomplete, this cancels the request."""
        self._response.close()


class HttpClient:
    """Sends requests over a pool of connections.

    Redirects are not followed, because they could lead to another server or machine.
    """

    def __init__(
        self,
        settings: ConnectionSettings,
        session: "aiohttp.ClientSession",
        fresh_session: "aiohttp.ClientSession",
    ) -> None:
        self._settings = settings
        self._session = session
        # opens a new connection for each request
        self._fresh_session = fresh_session
        self._headers = {"Content-Type": "application/json", "Accept": "text/event-stream"}
        if settings.api_key:
            self._headers["Authorization"] = f"Bearer {settings.api_key}"

    @asynccontextmanager
    async def stream(self, url: str, body: bytes) -> AsyncIterator[StreamResponse]:
        """Post a body, and yield the response for the `async with` block; it is closed at the end
        of the block. Raises RequestError. A BadStreamError, a timeout or a connection error inside
        the block also becomes a RequestError.
        """
        async with self._translated_errors(), await self._post(url, body) as response:
            await _check_status(response)
            yield StreamResponse(response)

    async def fetch_json(self, url: str, body: bytes | None = None) -> dict[str, Any]:
        """Get a URL, or post `body` to it if given, and return the response's JSON object. Raises
        RequestError.
        """
        method = "GET" if body is None else "POST"
        async with (
            self._translated_errors(),
            self._fresh_session.request(
                method, url, data=body, headers=self._headers, allow_redirects=False
            ) as response,
        ):
            await _check_status(response)
            return parse_event(await _read_body(response))

    @asynccontextmanager
    async def _translated_errors(self) -> AsyncIterator[None]:
        """Run an `async with` block with the time limit of a request. Timeouts, connection errors
        and BadStreamErrors in the block are raised as RequestError.
        """
        import aiohttp

        try:
            async with asyncio.timeout(self._settings.timeout_seconds):
                yield
        except TimeoutError:
            raise RequestError("timeout") from None
        except BadStreamError as error:
            raise RequestError("bad stream", str(error)) from None
        except aiohttp.ClientConnectorCertificateError as error:
            raise CertificateError("no connection", str(error.certificate_error)) from None
        except aiohttp.ClientConnectorError as error:
            raise RequestError("no connection", str(error)) from None
        except (aiohttp.ClientError, OSError) as error:
            raise RequestError("broken off", str(error) or type(error).__name__) from None

    async def _post(self, url: str, body: bytes) -> "aiohttp.ClientResponse":
        """Post a body and return the response when its headers have arrived.

        A server may close an idle connection just when the pool reuses it (llama-server closes
        connections after each stream). A request that fails in this way is sent again over a new
        connection.
        """
        import aiohttp

        try:
            return await self._post_over(self._session, url, body)
        except aiohttp.ClientConnectorError:
            raise
        except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError):
            return await self._post_over(self._fresh_session, url, body)

    async def _post_over(
        self, session: "aiohttp.ClientSession", url: str, body: bytes
    ) -> "aiohttp.ClientResponse":
        return await session.post(url, data=body, headers=self._headers, allow_redirects=False)


@asynccontextmanager
async def open_http_client(settings: ConnectionSettings) -> AsyncIterator[HttpClient]:
    """Yield a client for the `async with` block; its connections are closed at the end of the
    block. Raises UserError for a certificate file that cannot be read.
    """
    import aiohttp

    tls = _tls_context(settings) if settings.uses_tls else False

    def open_session(force_close: bool) -> aiohttp.ClientSession:
        # aiohttp's default timeout would end long answers; `_translated_errors` limits the time
        connector = aiohttp.TCPConnector(limit=0, ssl=tls, force_close=force_close)
        return aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None))

    async with open_session(False) as session, open_session(True) as fresh_session:
        yield HttpClient(settings, session, fresh_session)


async def _check_status(response: "aiohttp.ClientResponse") -> None:
    """Raise StatusError with the server's error text if the status is not 200."""
    if response.status == 200:
        return
    body = await _read_body(response)
    text = body[:MAX_ERROR_BYTES].decode("utf-8", "replace")
    if response.status in range(300, 400) and (location := response.headers.get("Location")):
        text = f"it redirects to {location[:MAX_ERROR_BYTES]}"
    with suppress(BadStreamError):
        text = read_error_message(parse_event(body)) or text
    raise StatusError(response.status, text)


async def _read_body(response: "aiohttp.ClientResponse") -> bytes:
    """Return the whole body. Raises BadStreamError if it is longer than MAX_BODY_BYTES."""
    body = bytearray()
    async for piece in response.content.iter_any():
        body += piece
        if len(body) > MAX_BODY_BYTES:
            raise BadStreamError("the answer is too long")
    return bytes(body)


def _tls_context(settings: ConnectionSettings) -> ssl.SSLContext:
    """Return the TLS settings for `cacert` and `insecure`. Raises UserError for a bad `cacert`."""
    try:
        context = ssl.create_default_context(cafile=settings.cacert)
    except (OSError, ssl.SSLError):
        raise UserError(
            f"{settings.cacert} is not a certificate", hint="--cacert takes a PEM file"
        ) from None
    if settings.insecure:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context
