"""One model in a process of its own, started again where it is lost (relay.py is what runs there).

Its end is llama.cpp's when a worker of `--rpc` goes, or a signal's. What it was answering is Lost
to who asked; what waits for it is told why where it does not come back.
"""

import asyncio
import multiprocessing
import os
import signal
import socket
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from typing import Any

from starlette.types import Message

from llmcli.errors import UserError
from llmcli.serve import relay
from llmcli.serve.front import Lost
from llmcli.serve.relay import Open, packed, read

# seconds without a sign of life: a pass over a whole batch may take long, a lost link half a minute
STUCK = 120.0
BACKOFF = (0.5, 1.0, 2.0, 5.0, 10.0)  # seconds before it is started again, by how often in vain


class Child:
    """Made with `start`, used on one event loop; `note` is told what becomes of it."""

    def __init__(self, open_model: Open, note: Callable[[str], None]) -> None:
        self._open, self._note = open_model, note
        self._calls: dict[int, asyncio.Queue[Any]] = {}
        self._count = 0
        self._why = "it is being started"
        self._up = asyncio.Event()
        self._writer: asyncio.StreamWriter | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._process: Any = None
        self._link: socket.socket | None = None
        self.facts: dict[str, Any] = {}

    @property
    def pid(self) -> int:
        """Of the process that holds the model now."""
        found: int = self._process.pid
        return found

    def start(self) -> None:
        """Open the model; raises UserError where that fails, in its words."""
        ours, theirs = socket.socketpair()
        # A fresh interpreter: llama.cpp's threads do not survive a fork.
        process = multiprocessing.get_context("spawn").Process(
            target=relay.live, args=(self._open, theirs)
        )
        try:
            with theirs:
                process.start()
            frame = relay.read_now(ours)
        except BaseException:
            ours.close()
            if process.pid is not None:
                process.join()
            raise
        if frame is None or frame[0] != "ready":
            ours.close()
            process.join()
            what = (
                frame[1:]
                if frame
                else (f"it ended with {process.exitcode}", "what it said stands above")
            )
            raise UserError(what[0], hint=what[1])
        self._process, self._link, self.facts = process, ours, frame[1]

    def keep(self) -> None:
        """From now on, on this event loop, hear it and start it again where it is lost."""
        if self._keeper is None:
            self._keeper = asyncio.create_task(self._watch())

    def close(self) -> None:
        """End it: what it still does is nobody's any more."""
        if self._keeper:
            self._keeper.cancel()
        if self._link:
            self._link.close()
        if self._process:
            self._process.join(10)
            if self._process.is_alive():
                self._process.kill()
                self._process.join()

    def stop(self) -> None:
        """End every answer now."""
        self._lose("the server is stopping")

    async def wait(self, seconds: float) -> str:
        """Until it answers: "", or why it does not."""
        self.keep()
        await asyncio.sleep(0)  # one that was just started is up after a turn of the loop
        if not self._up.is_set():
            try:
                await asyncio.wait_for(self._up.wait(), seconds)
            except TimeoutError:
                return self._why
        return ""

    async def ask(
        self, scope: dict[str, Any], body: bytes, key: bytes
    ) -> AsyncGenerator[Message, None]:
        """Upstream's."""
        number, queue = self._begin(scope)
        try:
            self._tell(number, {"type": "http.request", "body": body, "more_body": False})
            while (message := await self._next(queue)) is not None:
                yield message
        finally:
            self._forget(number)

    def _begin(self, scope: dict[str, Any]) -> "tuple[int, asyncio.Queue[Any]]":
        self._count += 1
        queue: asyncio.Queue[Any] = asyncio.Queue()
        if self._writer is None:
            raise Lost
        self._calls[self._count] = queue
        self._writer.write(packed(("open", self._count, scope)))
        return self._count, queue

    def _tell(self, number: int, message: Message) -> None:
        if self._writer is not None and number in self._calls:
            self._writer.write(packed(("in", number, message)))

    def _forget(self, number: int) -> None:
        self._tell(number, {"type": "http.disconnect"})
        self._calls.pop(number, None)

    async def _next(self, queue: "asyncio.Queue[Any]") -> Message | None:
        found = await queue.get()
        if isinstance(found, Lost):
            raise found
        message: Message | None = found
        return message

    async def _watch(self) -> None:
        """Read what it says; where it ends, start it again."""
        tried = 0
        while True:
            if self._link is not None:
                tried = 0
                await self._listen(self._link)
                self._lose(f"its process ended ({await self._end()})")
                self._note(f"the model was lost: {self._why}; it is started again")
            await asyncio.sleep(BACKOFF[min(tried, len(BACKOFF) - 1)])
            tried += 1
            try:
                await asyncio.to_thread(self.start)
                self._note("the model is back")
            except (
                UserError,
                OSError,
            ) as error:  # the latter where the system has no process or file for it just now
                if str(error) != self._why:
                    self._note(f"it does not start: {error}")
                self._why = str(error)

    async def _listen(self, link: socket.socket) -> None:
        reader, self._writer = await asyncio.open_connection(sock=link)
        self._up.set()
        try:
            while frame := await asyncio.wait_for(read(reader), STUCK):
                kind, number, content = frame
                if kind in ("out", "end") and (queue := self._calls.get(number)):
                    queue.put_nowait(content)
        except TimeoutError:
            self._why = f"no sign of life for {STUCK:.0f} s"
            with suppress(OSError):
                os.kill(self.pid, signal.SIGKILL)
        finally:
            self._up.clear()  # before its process is gone: whoever asks now waits for the next one
            self._writer.close()
            self._writer, self._link = None, None

    async def _end(self) -> str:
        await asyncio.to_thread(self._process.join)
        code = self._process.exitcode
        return signal.Signals(-code).name if code < 0 else f"exit code {code}"

    def _lose(self, why: str) -> None:
        self._up.clear()
        self._why = why
        for queue in self._calls.values():
            queue.put_nowait(Lost(why))
        self._calls.clear()
