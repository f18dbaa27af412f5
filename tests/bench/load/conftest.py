"""A server that says what a test wants, and a loop whose clock jumps to whatever is due next."""

import asyncio
import json
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from llmcli.bench.load import drive


@dataclass
class Scripted:
    """Answers the next request with the next of `replies` (raw bytes; the last one again and
    again). What came is kept: each request's head, and its body. A connection is closed after each
    answer.
    """

    replies: list[bytes]
    heads: list[str] = field(default_factory=list)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    links: list[asyncio.StreamWriter] = field(default_factory=list)
    port: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.links.append(writer)
        # A client that left, or `close`, ends it anywhere.
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            await self._answer(reader, writer)
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = next(
            (
                int(line[15:])
                for line in head.lower().split("\r\n")
                if line.startswith("content-length:")
            ),
            0,
        )
        body = json.loads(await reader.readexactly(length) or b"{}")
        if "/odd" in head.split("\r\n")[0]:
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 11\r\n\r\n<html>hello")
        elif "/models" in head.split("\r\n")[0]:
            writer.write(plain({"data": [{"id": "scripted"}]}))
        elif not body["stream"]:
            words = len(body["messages"][-1]["content"].split())
            writer.write(
                plain({"usage": {"prompt_tokens": 10 + 2 * words, "completion_tokens": 1}})
            )
        else:
            self.heads.append(head)
            self.bodies.append(body)
            writer.write(self.replies[min(len(self.heads), len(self.replies)) - 1])


def plain(document: dict[str, Any], status: str = "200 OK") -> bytes:
    """An answer that is no stream."""
    body = json.dumps(document).encode()
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


def streamed(*chunks: dict[str, Any] | str, done: bool = True) -> bytes:
    """A stream of chunks; a text is a chunk with that content."""
    told = [text(one) if isinstance(one, str) else one for one in chunks]
    events = b"".join(b"data: " + json.dumps(one).encode() + b"\n\n" for one in told)
    return (
        b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
        + events
        + b"data: [DONE]\n\n" * done
    )


def text(words: str, **more: Any) -> dict[str, Any]:
    """A chunk with content."""
    return {"choices": [{"index": 0, "delta": {"content": words}, **more}]}


def counted(prompt: int, output: int, cached: int = 0) -> dict[str, Any]:
    """The last chunk: what the server counted."""
    details = {"cached_tokens": cached}
    usage = {"prompt_tokens": prompt, "completion_tokens": output, "prompt_tokens_details": details}
    return {"choices": [], "usage": usage}


@pytest.fixture
def scripted() -> Iterator[Callable[..., Scripted]]:
    """Servers in a thread, each by its replies."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    servers: list[tuple[asyncio.Server, Scripted]] = []

    def start(*replies: bytes) -> Scripted:
        made = Scripted(list(replies))
        server = asyncio.run_coroutine_threadsafe(
            asyncio.start_server(made.serve, "127.0.0.1", 0), loop
        ).result()
        servers.append((server, made))
        made.port = server.sockets[0].getsockname()[1]
        return made

    def cut() -> None:
        for _, made in servers:
            for link in made.links:
                link.transport.abort()

    async def close() -> None:
        while asyncio.all_tasks() - {asyncio.current_task()}:
            cut()
            await asyncio.sleep(0)  # what was being accepted has a link then
        cut()
        for (
            server,
            _,
        ) in servers:  # nothing is on its way to it now: asyncio leaves such a connection open
            server.close()
        for server, _ in servers:
            await server.wait_closed()

    yield start
    asyncio.run_coroutine_threadsafe(close(), loop).result()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


class Jumping(asyncio.SelectorEventLoop):
    """A loop that never waits: its clock jumps to whatever is due next."""

    now = 1000.0

    def time(self) -> float:
        return self.now

    def _run_once(self) -> None:
        if not self._ready and self._scheduled:  # type: ignore[attr-defined]
            self.now = max(self.now, self._scheduled[0].when())  # type: ignore[attr-defined]
        super()._run_once()  # type: ignore[misc]


@pytest.fixture
def jumping(monkeypatch: pytest.MonkeyPatch) -> Callable[[Coroutine[Any, Any, Any]], Any]:
    """Run a coroutine in time that jumps; the driver's clock is the loop's."""

    def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
        with asyncio.Runner(loop_factory=Jumping) as runner:
            loop = runner.get_loop()
            clock = SimpleNamespace(perf_counter=loop.time, process_time=loop.time)
            monkeypatch.setattr(drive, "time", clock)
            return runner.run(coroutine)

    return run
