"""The HTTP client of load tests: one connection pool, one coroutine per request, and a time stamp
for every piece of text.

aiohttp handles several times as many requests and chunks per CPU second as httpx; the client must
not limit what is measured.
"""

import asyncio
import json
import ssl
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from llmcli.bench.load import sse
from llmcli.bench.load.records import LoadAnswer, LoadJob
from llmcli.errors import UserError

if TYPE_CHECKING:
    import aiohttp

MAX_BODY_BYTES = 1 << 22  # bytes read of an answer that is not a stream


@dataclass(frozen=True, slots=True)
class LoadTarget:
    """A server, and how to send requests to it.

    `base`: the URL before /chat/completions. `extra`: additional fields of each request body.
    `timeout`: seconds.
    """

    base_url: str
    model: str = ""
    api_key: str | None = None
    chat: bool = True
    extra_fields: Mapping[str, Any] = field(default_factory=dict)
    cacert: Path | None = None
    insecure: bool = False
    timeout_seconds: float = 600.0

    @property
    def url(self) -> str:
        """The URL of the endpoint."""
        return self.base_url + ("/chat/completions" if self.chat else "/completions")

    @property
    def is_local(self) -> bool:
        """Whether the server runs on this machine."""
        return (urlsplit(self.base_url).hostname or "") in ("127.0.0.1", "localhost", "::1")


def parse_base_url(url: str) -> str:
    """Return the base URL of an API from http://host:8080, …/v1 or …/v1/chat/completions. Raises
    UserError.
    """
    try:
        parts = urlsplit(url)
        is_valid = (
            parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
        )
    except ValueError:
        is_valid = False
    if not is_valid:
        raise UserError(
            f"{url!r} is not a server address", hint="llmcli bench load http://127.0.0.1:8080"
        )
    path = parts.path.rstrip("/").removesuffix("/completions").removesuffix("/chat")
    return f"{parts.scheme}://{parts.netloc}{path or '/v1'}"


class Client:
    """Sends requests to one server."""

    def __init__(
        self, server: LoadTarget, session: "aiohttp.ClientSession", fresh: "aiohttp.ClientSession"
    ) -> None:
        # `fresh` opens a new connection for each request
        self.server, self.session, self.fresh = server, session, fresh
        self.headers = {"Content-Type": "application/json", "Accept": "text/event-stream"}
        if server.api_key:
            self.headers["Authorization"] = f"Bearer {server.api_key}"

    def request_body(self, job: LoadJob, streamed: bool = True) -> bytes:
        """Return the request body of a job."""
        server = self.server
        body: dict[str, Any] = {
            "model": server.model,
            "max_tokens": job.max_tokens,
            "stream": streamed,
        }
        if streamed:
            body["stream_options"] = {"include_usage": True}
        if server.chat:
            system = [{"role": "system", "content": job.shared}] if job.shared else []
            body["messages"] = job.messages or [*system, {"role": "user", "content": job.text}]
        else:
            texts = [str(message.get("content", "")) for message in job.messages or ()] or [
                job.shared,
                job.text,
            ]
            body["prompt"] = "\n".join(word for word in texts if word)
        return json.dumps({**body, **server.extra_fields}).encode()

    async def send(self, job: LoadJob, answer: LoadAnswer) -> None:
        """Send a job and fill in its answer, including errors. If the request is canceled, the
        answer has no end time.
        """
        import aiohttp

        body = self.request_body(job)
        answer.sent = time.perf_counter()
        try:
            async with asyncio.timeout(self.server.timeout_seconds):
                async with await self._post(body) as response:
                    if response.status != 200:
                        answer.error, answer.error_message = (
                            f"http {response.status}",
                            await _complaint(response),
                        )
                    elif job.cancel_after == 0:
                        answer.cancelled = True
                        response.close()
                    else:
                        await _read(response, job, answer)
        except TimeoutError:
            answer.error = "timeout"
        except sse.BadStreamError as error:
            answer.error, answer.error_message = "bad stream", str(error)
        except aiohttp.ClientConnectorError as error:
            answer.error, answer.error_message = "no connection", str(error)
        except (aiohttp.ClientError, OSError) as error:
            answer.error, answer.error_message = "broken off", str(error) or type(error).__name__
        answer.ended = time.perf_counter()

    async def _post(self, body: bytes) -> "aiohttp.ClientResponse":
        """Send the request and return the response with its headers.

        A server may close a kept connection at the moment when it is used again (llama-server does
        after each stream). If nothing was received, the request is sent again over a new
        connection.
        """
        import aiohttp

        try:
            return await self._sent(self.session, body)
        except aiohttp.ClientConnectorError:
            raise
        except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError):
            return await self._sent(self.fresh, body)

    async def _sent(
        self, session: "aiohttp.ClientSession", body: bytes
    ) -> "aiohttp.ClientResponse":
        """Send the request without following redirects: they could lead to another server or
        machine.
        """
        return await session.post(
            self.server.url, data=body, headers=self.headers, allow_redirects=False
        )

    async def complete(self, job: LoadJob) -> dict[str, Any]:
        """Return the complete answer to a job without streaming. Raises UserError."""
        return await self._json(self.server.url, self.request_body(job, streamed=False))

    async def list_models(self) -> list[str]:
        """Return the model names of the server. Raises UserError."""
        data = (await self._json(self.server.base_url + "/models")).get("data")
        entries = data if isinstance(data, list) else []
        return [
            entry["id"]
            for entry in entries
            if isinstance(entry, dict) and isinstance(entry.get("id"), str)
        ]

    async def _json(self, url: str, body: bytes | None = None) -> dict[str, Any]:
        import aiohttp

        try:
            async with asyncio.timeout(self.server.timeout_seconds):
                method = "GET" if body is None else "POST"
                async with self.fresh.request(
                    method, url, data=body, headers=self.headers, allow_redirects=False
                ) as response:
                    if response.status != 200:
                        says = await _complaint(response)
                        raise UserError(
                            f"{url} answers {response.status}: {says}", hint=_hint(response.status)
                        )
                    return sse.parse_event(await _bytes(response))
        except aiohttp.ClientConnectorCertificateError as error:
            hint = "--cacert FILE trusts its issuer, --insecure skips the check"
            raise UserError(f"{url}: {error.certificate_error}", hint=hint) from None
        except sse.BadStreamError as error:
            hint = "the address is http://HOST:PORT or …/v1 of a server with OpenAI's API"
            raise UserError(f"{url} does not use OpenAI's API: {error}", hint=hint) from None
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            reason = "timeout" if isinstance(error, TimeoutError) else error
            raise UserError(
                f"{url}: {reason}", hint="is the server running? llmcli serve REF starts one"
            ) from None


@asynccontextmanager
async def open_client(server: LoadTarget) -> AsyncIterator[Client]:
    """Open a client with its connections, and close them at the end. Raises UserError for a
    certificate that cannot be read.
    """
    import aiohttp

    tls = _tls(server) if server.base_url.startswith("https") else False

    def session(force_close: bool) -> aiohttp.ClientSession:
        # The session's own timeouts would end long answers; `send` limits the whole request.
        connector = aiohttp.TCPConnector(limit=0, ssl=tls, force_close=force_close)
        return aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None))

    async with session(False) as reusing, session(True) as fresh:
        yield Client(server, reusing, fresh)


async def _read(response: "aiohttp.ClientResponse", job: LoadJob, answer: LoadAnswer) -> None:
    """Record a time stamp for every piece of text, until the end of the answer or until the job is
    to be canceled.
    """
    events, done = sse.EventDecoder(), False
    async for piece in response.content.iter_any():
        now = time.perf_counter()
        for data in events.feed(piece):
            if data == sse.DONE_MARK:
                done = True
                continue
            chunk = sse.parse_event(data)
            if says := sse.read_error_message(chunk):
                answer.error, answer.error_message = "error in the stream", says
                return
            count, finish = sse.count_tokens(chunk)
            if count:
                answer.arrival_times.append(now)
                answer.token_counts.append(count)
            answer.finish_reason = finish or answer.finish_reason
            if token_usage := sse.read_usage(chunk):
                answer.prompt_tokens, answer.output_tokens, answer.cached_tokens = (
                    token_usage.prompt,
                    token_usage.output,
                    token_usage.cached,
                )
        if job.cancel_after is not None and len(answer.arrival_times) >= job.cancel_after and not done:
            answer.cancelled = True
            response.close()
            return
    if not (done or answer.finish_reason):
        answer.error = "broken off"
    elif not answer.arrival_times:
        answer.error = "no text"


async def _bytes(response: "aiohttp.ClientResponse") -> bytes:
    body = bytearray()
    async for piece in response.content.iter_any():
        body += piece
        if len(body) > MAX_BODY_BYTES:
            raise sse.BadStreamError("the answer is too long")
    return bytes(body)


async def _complaint(response: "aiohttp.ClientResponse") -> str:
    body = await _bytes(response)
    try:
        return sse.read_error_message(sse.parse_event(body)) or body[:200].decode("utf-8", "replace")
    except sse.BadStreamError:
        return body[:200].decode("utf-8", "replace")


def _hint(status: int) -> str:
    if status in (401, 403):
        return "--api-key-file FILE sends a key"
    return (
        "--model NAME and --endpoint completions change the request"
        if status in (400, 404)
        else "check the server's log"
    )


def _tls(server: LoadTarget) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=server.cacert)
    except (OSError, ssl.SSLError):
        raise UserError(
            f"{server.cacert} is not a certificate", hint="--cacert takes a PEM file"
        ) from None
    if server.insecure:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context
