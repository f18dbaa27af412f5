"""Runs one model in a separate process and restarts the process when it ends. That process runs
asgi_relay.run_model_process.

If a worker of `--rpc` is lost, llama.cpp ends its process. Requests that were running get
UpstreamLost. Requests that wait for the restart receive the reason if the restart fails.
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
from llmcli.serve.processes import asgi_relay
from llmcli.serve.processes.asgi_relay import OpenModel, encode_frame, read_frame
from llmcli.serve.processes.front import UpstreamLost

# Time without a heartbeat after which the process is killed. A pass over a full batch may take
# long, and it takes half a minute until a lost connection is noticed.
HEARTBEAT_TIMEOUT_SECONDS = 120.0
RESTART_DELAYS_SECONDS = (
    0.5,
    1.0,
    2.0,
    5.0,
    10.0,
)  # seconds before a restart, by the number of failed ones


class SupervisedProcess:
    """A model process. Call `start` first; all other methods run on one event loop. `note`:
    function that receives messages about restarts.
    """

    def __init__(self, open_model: OpenModel, note: Callable[[str], None]) -> None:
        self._open, self._note = open_model, note
        self._calls: dict[int, asyncio.Queue[Any]] = {}
        self._count = 0
        self._why = "the model is starting"
        self._available = asyncio.Event()
        self._writer: asyncio.StreamWriter | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._process: Any = None
        self._link: socket.socket | None = None
        self.facts: dict[str, Any] = {}

    @property
    def pid(self) -> int:
        """Id of the current model process."""
        pid: int = self._process.pid
        return pid

    def start(self) -> None:
        """Start the process and open its model. If that fails, raises UserError with the message of
        the process.
        """
        ours, theirs = socket.socketpair()
        # A new interpreter is needed, because llama.cpp's threads do not survive a fork.
        process = multiprocessing.get_context("spawn").Process(
            target=asgi_relay.run_model_process, args=(self._open, theirs)
        )
        try:
            with theirs:
                process.start()
            frame = asgi_relay.read_frame_blocking(ours)
        except BaseException:
            ours.close()
            if process.pid is not None:
                process.join()
            raise
        if frame is None or frame[0] != "ready":
            ours.close()
            process.join()
            failure = (
                frame[1:]
                if frame
                else (
                    f"the model's process ended with exit code {process.exitcode}",
                    "its output is above",
                )
            )
            raise UserError(failure[0], hint=failure[1])
        self._process, self._link, self.facts = process, ours, frame[1]

    def supervise(self) -> None:
        """Start a task on the current event loop that reads the process's messages and restarts the
        process when it ends.
        """
        if self._supervisor is None:
            self._supervisor = asyncio.create_task(self._supervise())

    def close(self) -> None:
        """End the process. Its running requests are lost."""
        if self._supervisor:
            self._supervisor.cancel()
        if self._link:
            self._link.close()
        if self._process:
            self._process.join(10)
            if self._process.is_alive():
                self._process.kill()
                self._process.join()

    def stop(self) -> None:
        """Cancel every answer now."""
        self._fail_calls("the server is stopping")

    async def wait(self, seconds: float) -> str:
        """Wait until the model is available. Return "", or after `seconds` the reason why it is not
        available.
        """
        self.supervise()
        # after a start, the model is available after one turn of the event loop
        await asyncio.sleep(0)
        if not self._available.is_set():
            try:
                await asyncio.wait_for(self._available.wait(), seconds)
            except TimeoutError:
                return self._why
        return ""

    async def ask(
        self, scope: dict[str, Any], body: bytes, key: bytes
    ) -> AsyncGenerator[Message, None]:
        """Implements Upstream.ask."""
        number, queue = self._open_call(scope)
        try:
            self._send(number, {"type": "http.request", "body": body, "more_body": False})
            while (message := await self._next_message(queue)) is not None:
                yield message
        finally:
            self._close_call(number)

    def _open_call(self, scope: dict[str, Any]) -> "tuple[int, asyncio.Queue[Any]]":
        self._count += 1
        queue: asyncio.Queue[Any] = asyncio.Queue()
        if self._writer is None:
            raise UpstreamLost
        self._calls[self._count] = queue
        self._writer.write(encode_frame(("open", self._count, scope)))
        return self._count, queue

    def _send(self, number: int, message: Message) -> None:
        if self._writer is not None and number in self._calls:
            self._writer.write(encode_frame(("in", number, message)))

    def _close_call(self, number: int) -> None:
        self._send(number, {"type": "http.disconnect"})
        self._calls.pop(number, None)

    async def _next_message(self, queue: "asyncio.Queue[Any]") -> Message | None:
        item = await queue.get()
        if isinstance(item, UpstreamLost):
            raise item
        message: Message | None = item
        return message

    async def _supervise(self) -> None:
        """Read the process's messages, and restart the process when it ends, until cancelled."""
        failures = 0
        while True:
            if self._link is not None:
                failures = 0
                await self._read_frames(self._link)
                self._fail_calls(f"its process ended ({await self._wait_for_exit()})")
                self._note(f"the model was lost: {self._why}; restarting it")
            await asyncio.sleep(
                RESTART_DELAYS_SECONDS[min(failures, len(RESTART_DELAYS_SECONDS) - 1)]
            )
            failures += 1
            try:
                await asyncio.to_thread(self.start)
                self._note("the model is available again")
            # OSError: the system has no free process or file at the moment.
            except (UserError, OSError) as error:
                if str(error) != self._why:
                    self._note(f"the model does not start: {error}")
                self._why = str(error)

    async def _read_frames(self, link: socket.socket) -> None:
        reader, self._writer = await asyncio.open_connection(sock=link)
        self._available.set()
        try:
            while frame := await asyncio.wait_for(read_frame(reader), HEARTBEAT_TIMEOUT_SECONDS):
                kind, number, content = frame
                if kind in ("out", "end") and (queue := self._calls.get(number)):
                    queue.put_nowait(content)
        except TimeoutError:
            self._why = f"no heartbeat for {HEARTBEAT_TIMEOUT_SECONDS:.0f} s"
            with suppress(OSError):
                os.kill(self.pid, signal.SIGKILL)
        finally:
            # cleared before the process has ended, so that new requests wait for the next process
            self._available.clear()
            self._writer.close()
            self._writer, self._link = None, None

    async def _wait_for_exit(self) -> str:
        await asyncio.to_thread(self._process.join)
        code = self._process.exitcode
        return signal.Signals(-code).name if code < 0 else f"exit code {code}"

    def _fail_calls(self, why: str) -> None:
        self._available.clear()
        self._why = why
        for queue in self._calls.values():
            queue.put_nowait(UpstreamLost(why))
        self._calls.clear()
