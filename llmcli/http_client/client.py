"""An HTTP client with a pool of connections, for requests whose responses are JSON or a stream.

It uses aiohttp, which processes several times as many requests and chunks per CPU second as httpx.
A load test must not measure its own client.
"""

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmcli.errors import UserError
from llmcli.http_client.sse import BadStreamError, parse_event, read_error_message

if TYPE_CHECKING:
    import aiohttp

MAX_BODY_BYTES = 1 << 22  # largest part of a response that is read if the response is not a stream
MAX_COMPLAINT_BYTES = 200  # largest part of an error that is shown if the error is not JSON


class RequestError(Exception):
    """A failed request. `kind`: "timeout", "no connection", "broken off", "bad stream", or a status
    such as "http 429"; `message`: the error text of the server or of the operating system.
    """

    def __init__(self, kind: str, message: str = "") -> None:
        super().__init__(message or kind)
        self.kind, self.message = kind, message


class StatusError(RequestError):
    """The server responded with a status other than 200."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"http {status}", message)
        self.status = status


class CertificateError(RequestError):
    """The server's certificate is not trusted."""


@dataclass(frozen=True, slots=True)
class ConnectionSettings:
    """How to connect to a server. `uses_tls`: whether the server's URL is https; `cacert`: a PEM
    file with the certificates to trust instead of the system's; `insecure`: whether any certificate
    is accepted.
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
        """Return an iterator of the body's pieces as they arrive."""
        return self._response.content.iter_any()

    def close(self) -> None:
        """Close the connection even if more of the body would arrive."""
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
        # a session that opens a new connection for each request
        self._fresh_session = fresh_session
        self._headers = {"Content-Type": "application/json", "Accept": "text/event-stream"}
        if settings.api_key:
            self._headers["Authorization"] = f"Bearer {settings.api_key}"

    @asynccontextmanager
    async def stream(self, url: str, body: bytes) -> AsyncIterator[StreamResponse]:
        """Post a body and yield the response, which is closed at the end of the block. Raises
        RequestError. Inside the block, a BadStreamError or a connection error is raised as
        RequestError, too.
        """
        async with self._translated_errors(), await self._post(url, body) as response:
            await _check_status(response)
            yield StreamResponse(response)

    async def fetch_json(self, url: str, body: bytes | None = None) -> dict[str, Any]:
        """Return the JSON object at a URL. If `body` is not None, it is posted. Raises
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
        """Limit the time of a block, and raise timeouts and connection errors in it as
        RequestError.
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
        """Send the request and return the response as soon as its headers have arrived.

        A server may close an idle connection at the moment when it is used again (llama-server does
        so after each stream). If no response was received on such a connection, the request is sent
        again over a new connection.
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
    """Open a client and close its connections at the end of the block. Raises UserError for a
    certificate file that cannot be read.
    """
    import aiohttp

    tls = _tls_context(settings) if settings.uses_tls else False

    def open_session(force_close: bool) -> aiohttp.ClientSession:
        # The default timeouts of a session would end long answers. Each request has its own
        # timeout.
        connector = aiohttp.TCPConnector(limit=0, ssl=tls, force_close=force_close)
        return aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None))

    async with open_session(False) as session, open_session(True) as fresh_session:
        yield HttpClient(settings, session, fresh_session)


async def _check_status(response: "aiohttp.ClientResponse") -> None:
    """Raise StatusError with the server's error text if the status is not 200."""
    if response.status == 200:
        return
    body = await _read_body(response)
    text = body[:MAX_COMPLAINT_BYTES].decode("utf-8", "replace")
    with suppress(BadStreamError):
        text = read_error_message(parse_event(body)) or text
    raise StatusError(response.status, text)


async def _read_body(response: "aiohttp.ClientResponse") -> bytes:
    body = bytearray()
    async for piece in response.content.iter_any():
        body += piece
        if len(body) > MAX_BODY_BYTES:
            raise BadStreamError("the answer is too long")
    return bytes(body)


def _tls_context(settings: ConnectionSettings) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=settings.cacert)
    except (OSError, ssl.SSLError):
        raise UserError(
            f"{settings.cacert} is not a certificate", hint="--cacert takes a PEM file"
        ) from None
    if settings.insecure:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context
