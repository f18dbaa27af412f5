"""The client of load tests: sends requests to a server, and records the arrival time of each chunk
of an answer.
"""

import json
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmcli.bench.load.records import LoadAnswer, LoadJob
from llmcli.errors import UserError
from llmcli.http_client import openai_stream, sse
from llmcli.http_client.client import (
    CertificateError,
    ConnectionSettings,
    HttpClient,
    RequestError,
    StatusError,
    StreamResponse,
    open_http_client,
)
from llmcli.loopback import is_loopback


@dataclass(frozen=True, slots=True)
class LoadTarget:
    """The server of a load test, and how to send requests to it.

    `base_url`: the URL up to, but not including, /chat/completions. `chat`: use /chat/completions,
    otherwise /completions. `extra_fields`: additional fields of each request body.
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
    def connection(self) -> ConnectionSettings:
        """The TLS, key and timeout settings for connections to the server."""
        return ConnectionSettings(
            uses_tls=self.base_url.startswith("https"),
            api_key=self.api_key,
            cacert=self.cacert,
            insecure=self.insecure,
            timeout_seconds=self.timeout_seconds,
        )

    @property
    def is_local(self) -> bool:
        """Whether the server runs on this machine."""
        return is_loopback(self.base_url)


class Client:
    """Sends requests to one server. A `LoadJob` describes one request."""

    def __init__(self, server: LoadTarget, http: HttpClient) -> None:
        self.server, self._http = server, http

    def request_body(self, job: LoadJob, streamed: bool = True) -> bytes:
        """Return the HTTP body of a request as JSON."""
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
        """Send a request, and record the streamed answer or the error in `answer`. If this
        coroutine is canceled, `answer.ended` stays None.
        """
        body = self.request_body(job)
        answer.sent = time.perf_counter()
        try:
            async with self._http.stream(self.server.url, body) as response:
                if job.cancel_after == 0:
                    answer.cancelled = True
                    response.close()
                else:
                    await _read_stream(response, job, answer)
        except RequestError as error:
            answer.error, answer.error_message = error.kind, error.message
        answer.ended = time.perf_counter()

    async def complete(self, job: LoadJob) -> dict[str, Any]:
        """Send a request without streaming, and return the server's JSON answer. Raises
        UserError.
        """
        return await self._fetch(self.server.url, self.request_body(job, streamed=False))

    async def list_models(self) -> list[str]:
        """Return the model names of the server. Raises UserError."""
        document = await self._fetch(self.server.base_url + "/models")
        return [str(entry["id"]) for entry in openai_stream.read_model_entries(document)]

    async def _fetch(self, url: str, body: bytes | None = None) -> dict[str, Any]:
        try:
            return await self._http.fetch_json(url, body)
        except RequestError as error:
            raise _user_error(url, error) from None


@asynccontextmanager
async def open_client(server: LoadTarget) -> AsyncIterator[Client]:
    """Open a client with its HTTP connections, and close them at the end of the block. Raises
    UserError if the certificate file cannot be read.
    """
    async with open_http_client(server.connection) as http:
        yield Client(server, http)


async def _read_stream(response: StreamResponse, job: LoadJob, answer: LoadAnswer) -> None:
    """Record the arrival time and the token count of each chunk with text, until the answer ends or
    the job's `cancel_after` is reached.
    """
    events, done = sse.EventDecoder(), False
    async for piece in response.pieces():
        now = time.perf_counter()
        for data in events.feed(piece):
            if data == openai_stream.DONE_MARK:
                done = True
                continue
            chunk = sse.parse_event(data)
            if message := openai_stream.read_error_message(chunk):
                answer.error, answer.error_message = "error in the stream", message
                return
            count, finish = openai_stream.count_tokens(chunk)
            if count:
                answer.arrival_times.append(now)
                if answer.reply_time is None and openai_stream.has_reply(chunk):
                    answer.reply_time = now
                answer.token_counts.append(count)
            answer.finish_reason = finish or answer.finish_reason
            if token_usage := openai_stream.read_usage(chunk):
                answer.prompt_tokens, answer.output_tokens, answer.cached_tokens = (
                    token_usage.prompt,
                    token_usage.output,
                    token_usage.cached,
                )
        if (
            job.cancel_after is not None
            and len(answer.arrival_times) >= job.cancel_after
            and not done
        ):
            answer.cancelled = True
            response.close()
            return
    if not (done or answer.finish_reason):
        answer.error = "broken off"
    elif not answer.arrival_times:
        answer.error = "no text"


def _user_error(url: str, error: RequestError) -> UserError:
    match error:
        case StatusError():
            message = f"{url} answers {error.status}: {error.message}"
            return UserError(message, hint=_status_hint(error.status))
        case CertificateError():
            hint = "--cacert FILE trusts its issuer, --insecure skips the check"
            return UserError(f"{url}: {error.message}", hint=hint)
        case RequestError(kind="bad stream"):
            hint = "the address is http://HOST:PORT or …/v1 of a server with OpenAI's API"
            return UserError(f"{url} does not use OpenAI's API: {error.message}", hint=hint)
    hint = "is the server running? llmcli serve REF starts one"
    return UserError(f"{url}: {error.message or error.kind}", hint=hint)


def _status_hint(status: int) -> str:
    if status in (401, 403):
        return "--api-key-file FILE sends a key"
    return (
        "--model NAME and --endpoint completions change the request"
        if status in (400, 404)
        else "check the server's log"
    )
