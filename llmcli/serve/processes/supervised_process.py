"""Runs the model in a separate process, and restarts the process when it ends. The process runs
asgi_relay.run_model_process.

If a worker of `--rpc` is lost, llama.cpp aborts its process. Requests that were running get
UpstreamLost. Requests that wait for the restart get its error if it fails.
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

# Time without a heartbeat after which the process is killed. Heartbeats go on during a long pass; a
# process whose engine is stuck says so itself (asgi_relay.py).
HEARTBEAT_TIMEOUT_SECONDS = 120.0
# delays before a restart, by the number of restarts that have failed in a row
RESTART_DELAYS_SECONDS = (0.5, 1.0, 2.0, 5.0, 10.0)


class SupervisedProcess:
    """A model process, as the front server's Upstream. Call start() first; all other methods are
    called on one event loop. `open_model`: opens the model in the process. `note`: receives
    messages for the user about restarts. `facts`: what the process reports about its model.
    """

    def __init__(self, open_model: OpenModel, note: Callable[[str], None]) -> None:
        self._open_model, self._note = open_model, note
        self._calls: dict[int, asyncio.Queue[Any]] = {}
        self._n_calls = 0
        self._reason = "the model is starting"
        self._available = asyncio.Event()
        self._writer: asyncio.StreamWriter | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._process: Any = None
        self._link: socket.socket | None = None
        self.facts: dict[str, Any] = {}

    @property
    def pid(self) -> int:
        """The process id of the current model process."""
        pid: int = self._process.pid
        return pid

    def start(self) -> None:
        """Start the process, and wait until its model is open. Raises UserError with the error of
        the process if that fails.
        """
        our_end, process_end = socket.socketpair()
        # A new interpreter is needed, because llama.cpp's threads do not survive a fork.
        process = multiprocessing.get_context("spawn").Process(
            target=asgi_relay.run_model_process, args=(self._open_model, process_end)
        )
        try:
            with process_end:
                process.start()
            frame = asgi_relay.read_frame_blocking(our_end)
        except BaseException:
            our_end.close()
            if process.pid is not None:
                process.join()
            raise
        if frame is None or frame[0] != "ready":
            our_end.close()
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
        self._process, self._link, self.facts = process, our_end, frame[1]

    def supervise(self) -> None:
        """Start a task on the current event loop that reads the process's frames and restarts the
        process when it ends. If the task exists, do nothing.
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
        """Wait until the model can answer requests. Return "", or after `seconds` the reason why it
        cannot.
        """
        self.supervise()
        # right after start(), the supervising task must run once to make the model available
        await asyncio.sleep(0)
        if not self._available.is_set():
            try:
                async with asyncio.timeout(seconds):
                    await self._available.wait()
            except TimeoutError:
                return self._reason
        return ""

    async def ask(
        self, scope: dict[str, Any], body: bytes, key: bytes
    ) -> AsyncGenerator[Message, None]:
        """Send a request to the process, as Upstream.ask."""
        number, queue = self._open_call(scope)
        try:
            self._send(number, {"type": "http.request", "body": body, "more_body": False})
            while (message := await self._next_message(queue)) is not None:
                yield message
        finally:
            self._close_call(number)

    def _open_call(self, scope: dict[str, Any]) -> "tuple[int, asyncio.Queue[Any]]":
        """Send the scope of a request to the process. Return the request's number, and the queue of
        its response's ASGI messages.
        """
        self._n_calls += 1
        queue: asyncio.Queue[Any] = asyncio.Queue()
        if self._writer is None:
            raise UpstreamLost
        self._calls[self._n_calls] = queue
        self._writer.write(encode_frame(("open", self._n_calls, scope)))
        return self._n_calls, queue

    def _send(self, number: int, message: Message) -> None:
        """Send an ASGI message of a request to the process."""
        if self._writer is not None and number in self._calls:
            self._writer.write(encode_frame(("in", number, message)))

    def _close_call(self, number: int) -> None:
        """Tell the process that the client of a request has disconnected, and forget the
        request.
        """
        self._send(number, {"type": "http.disconnect"})
        self._calls.pop(number, None)

    async def _next_message(self, queue: "asyncio.Queue[Any]") -> Message | None:
        """Return the next ASGI message of a response, or None at its end. Raises UpstreamLost."""
        item = await queue.get()
        if isinstance(item, UpstreamLost):
            raise item
        message: Message | None = item
        return message

    async def _supervise(self) -> None:
        """Read the process's frames, and restart the process when it ends, until this task is
        canceled.
        """
        failures = 0
        while True:
            if self._link is not None:
                failures = 0
                why_killed = await self._read_frames(self._link)
                exit_status = await self._wait_for_exit()
                self._fail_calls(why_killed or f"its process ended ({exit_status})")
                self._note(f"the model was lost: {self._reason}; restarting it")
            await asyncio.sleep(
                RESTART_DELAYS_SECONDS[min(failures, len(RESTART_DELAYS_SECONDS) - 1)]
            )
            failures += 1
            try:
                await asyncio.to_thread(self.start)
                self._note("the model is available again")
            # OSError: the system has no free process or file at the moment.
            except (UserError, OSError) as error:
                if str(error) != self._reason:
                    self._note(f"the model does not start: {error}")
                self._reason = str(error)

    async def _read_frames(self, link: socket.socket) -> str:
        """Pass the frames of the process to the queues of its requests until the process ends. Kill
        the process if its heartbeats stop or its engine is stuck. Return why it was killed, or "".
        """
        why_killed = ""
        reader, self._writer = await asyncio.open_connection(sock=link)
        self._available.set()
        try:
            while True:
                async with asyncio.timeout(HEARTBEAT_TIMEOUT_SECONDS):
                    frame = await read_frame(reader)
                if frame is None:
                    break
                kind, number, content = frame
                if kind == "stuck":
                    why_killed = content
                    break
                if kind in ("out", "end") and (queue := self._calls.get(number)):
                    queue.put_nowait(content)
        except TimeoutError:
            why_killed = f"no heartbeat for {HEARTBEAT_TIMEOUT_SECONDS:.0f} s"
        finally:
            # cleared before the process has ended, so that new requests wait for the next process
            self._available.clear()
            self._writer.close()
            self._writer, self._link = None, None
        if why_killed:
            with suppress(OSError):
                os.kill(self.pid, signal.SIGKILL)
        return why_killed

    async def _wait_for_exit(self) -> str:
        """Wait until the process has ended. Return the name of the signal that ended it, or its
        exit code.
        """
        await asyncio.to_thread(self._process.join)
        code = self._process.exitcode
        return signal.Signals(-code).name if code < 0 else f"exit code {code}"

    def _fail_calls(self, reason: str) -> None:
        """End all running requests with UpstreamLost. `reason`: why the model is not available."""
        self._available.clear()
        self._reason = reason
        for queue in self._calls.values():
            queue.put_nowait(UpstreamLost(reason))
        self._calls.clear()
