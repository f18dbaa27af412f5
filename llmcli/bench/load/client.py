"""The client: one connection pool, one coroutine a request, a stamp for every piece of text. It
plans nothing.

2026-11-22: aiohttp rather than httpx (httpx2 2.16): against a server that answers at once, 16 at a
time, aiohttp 3.14 sends 4,100 requests and reads 66,000 chunks a CPU second, httpx 910 and 45,000;
a client must not be what is measured.
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
from llmcli.bench.load.records import Answer, Job
from llmcli.errors import UserError

if TYPE_CHECKING:
    import aiohttp

MOST_BODY = 1 << 22  # bytes that are read of an answer that is no stream


@dataclass(frozen=True, slots=True)
class Server:
    """Where requests go, and how. `base` ends before /chat/completions; `extra` are more fields of
    each body.
    """

    base: str
    model: str = ""
    key: str | None = None
    chat: bool = True
    extra: Mapping[str, Any] = field(default_factory=dict)
    cacert: Path | None = None
    insecure: bool = False
    timeout: float = 600.0

    @property
    def url(self) -> str:
        """The endpoint."""
        return self.base + ("/chat/completions" if self.chat else "/completions")

    @property
    def here(self) -> bool:
        """Whether it is this machine."""
        return (urlsplit(self.base).hostname or "") in ("127.0.0.1", "localhost", "::1")


def base(url: str) -> str:
    """The base of an API from what people type: http://host:8080, …/v1, …/v1/chat/completions.
    Raises UserError.
    """
    try:
        parts = urlsplit(url)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        good = False
    if not good:
        raise UserError(
            f"{url!r} is no address of a server", hint="llmcli bench load http://127.0.0.1:8080"
        )
    path = parts.path.rstrip("/").removesuffix("/completions").removesuffix("/chat")
    return f"{parts.scheme}://{parts.netloc}{path or '/v1'}"


class Client:
    """Sends requests to one server."""

    def __init__(
        self, server: Server, session: "aiohttp.ClientSession", fresh: "aiohttp.ClientSession"
    ) -> None:
        self.server, self.session, self.fresh = (
            server,
            session,
            fresh,
        )  # `fresh` keeps no connection
        self.headers = {"Content-Type": "application/json", "Accept": "text/event-stream"}
        if server.key:
            self.headers["Authorization"] = f"Bearer {server.key}"

    def body(self, job: Job, streamed: bool = True) -> bytes:
        """What is sent for a job."""
        server = self.server
        told: dict[str, Any] = {
            "model": server.model,
            "max_tokens": job.max_tokens,
            "stream": streamed,
        }
        if streamed:
            told["stream_options"] = {"include_usage": True}
        if server.chat:
            system = [{"role": "system", "content": job.shared}] if job.shared else []
            told["messages"] = job.messages or [*system, {"role": "user", "content": job.text}]
        else:
            words = [str(one.get("content", "")) for one in job.messages or ()] or [
                job.shared,
                job.text,
            ]
            told["prompt"] = "\n".join(word for word in words if word)
        return json.dumps({**told, **server.extra}).encode()

    async def ask(self, job: Job, answer: Answer) -> None:
        """Send a job and fill in its answer, errors included. If it is cancelled the answer stays
        without an end.
        """
        import aiohttp

        body = self.body(job)
        answer.sent = time.perf_counter()
        try:
            async with asyncio.timeout(self.server.timeout):
                async with await self._post(body) as response:
                    if response.status != 200:
                        answer.error, answer.says = (
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
        except sse.BadStream as error:
            answer.error, answer.says = "bad stream", str(error)
        except aiohttp.ClientConnectorError as error:
            answer.error, answer.says = "no connection", str(error)
        except (aiohttp.ClientError, OSError) as error:
            answer.error, answer.says = "broken off", str(error) or type(error).__name__
        answer.ended = time.perf_counter()

    async def _post(self, body: bytes) -> "aiohttp.ClientResponse":
        """The response's head. A server may close a kept connection just as it is used again
        (llama-server does after each stream): if nothing has come back yet, the request is sent
        once more over a new one.
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
        """Redirects are not followed: another server would be measured, and might be on another
        machine.
        """
        return await session.post(
            self.server.url, data=body, headers=self.headers, allow_redirects=False
        )

    async def once(self, job: Job) -> dict[str, Any]:
        """The whole answer to a job that is not streamed. Raises UserError."""
        return await self._json(self.server.url, self.body(job, streamed=False))

    async def models(self) -> list[str]:
        """The names under which the server has models. Raises UserError."""
        found = (await self._json(self.server.base + "/models")).get("data")
        listed = found if isinstance(found, list) else []
        return [
            one["id"] for one in listed if isinstance(one, dict) and isinstance(one.get("id"), str)
        ]

    async def _json(self, url: str, body: bytes | None = None) -> dict[str, Any]:
        import aiohttp

        try:
            async with asyncio.timeout(self.server.timeout):
                how = "GET" if body is None else "POST"
                async with self.fresh.request(
                    how, url, data=body, headers=self.headers, allow_redirects=False
                ) as response:
                    if response.status != 200:
                        says = await _complaint(response)
                        raise UserError(
                            f"{url} answers {response.status}: {says}", hint=_hint(response.status)
                        )
                    return sse.parsed(await _bytes(response))
        except aiohttp.ClientConnectorCertificateError as error:
            hint = "--cacert FILE names who signed it, --insecure asks nobody"
            raise UserError(f"{url}: {error.certificate_error}", hint=hint) from None
        except sse.BadStream as error:
            hint = "an address is http://HOST:PORT or …/v1 of a server with OpenAI's API"
            raise UserError(f"{url} speaks something else: {error}", hint=hint) from None
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            why = "timeout" if isinstance(error, TimeoutError) else error
            raise UserError(
                f"{url}: {why}", hint="is the server running? llmcli serve REF starts one"
            ) from None


@asynccontextmanager
async def opened(server: Server) -> AsyncIterator[Client]:
    """A client with its connections, closed at the end. Raises UserError for a certificate that
    cannot be read.
    """
    import aiohttp

    tls = _tls(server) if server.base.startswith("https") else False

    def session(force_close: bool) -> aiohttp.ClientSession:
        # Its own timeouts would end long answers; `ask` has one for the whole request.
        connector = aiohttp.TCPConnector(limit=0, ssl=tls, force_close=force_close)
        return aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None))

    async with session(False) as kept, session(True) as fresh:
        yield Client(server, kept, fresh)


async def _read(response: "aiohttp.ClientResponse", job: Job, answer: Answer) -> None:
    """Stamp what comes, until the end or until the job wants to go."""
    events, done = sse.Events(), False
    async for piece in response.content.iter_any():
        now = time.perf_counter()
        for data in events.feed(piece):
            if data == sse.DONE:
                done = True
                continue
            chunk = sse.parsed(data)
            if says := sse.complaint(chunk):
                answer.error, answer.says = "error in the stream", says
                return
            count, finish = sse.tokens(chunk)
            if count:
                answer.stamps.append(now)
                answer.counts.append(count)
            answer.finish = finish or answer.finish
            if told := sse.usage(chunk):
                answer.prompt_tokens, answer.output_tokens, answer.cached_tokens = (
                    told.prompt,
                    told.output,
                    told.cached,
                )
        if job.cancel_after is not None and len(answer.stamps) >= job.cancel_after and not done:
            answer.cancelled = True
            response.close()
            return
    if not (done or answer.finish):
        answer.error = "broken off"
    elif not answer.stamps:
        answer.error = "no text"


async def _bytes(response: "aiohttp.ClientResponse") -> bytes:
    found = bytearray()
    async for piece in response.content.iter_any():
        found += piece
        if len(found) > MOST_BODY:
            raise sse.BadStream("its answer is too long")
    return bytes(found)


async def _complaint(response: "aiohttp.ClientResponse") -> str:
    body = await _bytes(response)
    try:
        return sse.complaint(sse.parsed(body)) or body[:200].decode("utf-8", "replace")
    except sse.BadStream:
        return body[:200].decode("utf-8", "replace")


def _hint(status: int) -> str:
    if status in (401, 403):
        return "--api-key-file FILE sends a key"
    return (
        "--model NAME and --endpoint completions change what is asked"
        if status in (400, 404)
        else "ask its log"
    )


def _tls(server: Server) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=server.cacert)
    except (OSError, ssl.SSLError):
        raise UserError(
            f"{server.cacert} is no certificate", hint="--cacert takes a PEM file"
        ) from None
    if server.insecure:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context
