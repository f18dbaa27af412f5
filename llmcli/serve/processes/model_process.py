"""One process of a model, as the front server sees it: how it starts, the requests that it answers,
and its end. The process runs a main function of asgi_relay.py.
"""

import asyncio
import socket
from collections.abc import AsyncGenerator, Callable
from typing import Any

from starlette.types import Message

from llmcli.errors import UserError
from llmcli.serve.engine_thread.bridge import FLUSH_SECONDS
from llmcli.serve.processes import asgi_relay
from llmcli.serve.processes.asgi_relay import RelayFrame, encode_frame, read_frame
from llmcli.serve.processes.front import UpstreamKilled, UpstreamLost
from llmcli.serve.processes.interpreter import ChildProcess

# Time without a heartbeat after which the process is killed. Heartbeats go on during a long pass; a
# process whose engine is stuck reports that itself (asgi_relay.py).
HEARTBEAT_TIMEOUT_SECONDS = 120.0
# Time for a process to end after its link was closed. Before, it saves the states of its cache.
EXIT_SECONDS = FLUSH_SECONDS + 10.0

# signals that a program does not send itself by its own bugs
OUTSIDE_SIGNALS = ("SIGKILL", "SIGTERM")


class ProcessEnded(UserError):
    """A model process has ended without a report, for example because it was killed."""


class ModelProcess:
    """The link to a model process. A subclass starts it; afterwards, all methods are called on one
    event loop.
    """

    def __init__(self) -> None:
        self._calls: dict[int, asyncio.Queue[Any]] = {}
        self._n_calls = 0
        self._reason = "the model is starting"
        self._available = asyncio.Event()
        self._writer: asyncio.StreamWriter | None = None
        self._process: ChildProcess | None = None
        self._link: socket.socket | None = None

    @property
    def pid(self) -> int:
        """The process id of the current model process."""
        assert self._process is not None
        return self._process.pid

    def stop(self) -> None:
        """Cancel every answer now."""
        self._fail_calls("the server is stopping")

    def _spawn(self, main: Callable[..., None], *args: Any) -> tuple[ChildProcess, socket.socket]:
        """Start a process that runs `main`, whose last argument is the process's end of a link.
        Return the process and our end. Raises UserError if the system cannot start it.
        """
        our_end, process_end = socket.socketpair()
        try:
            with process_end:
                process = ChildProcess(main, (*args, process_end))
        except (OSError, EOFError) as error:
            our_end.close()
            raise UserError(f"the model's process cannot be started: {error}") from None
        except BaseException:
            our_end.close()
            raise
        return process, our_end

    def _read_report(self, process: ChildProcess, link: socket.socket, kind: str) -> RelayFrame:
        """Wait until a process reports that it has finished a step of its start. Raises UserError
        with the error of the process if that fails, and ProcessEnded if it reports nothing; the
        process has then ended.
        """
        try:
            frame = asgi_relay.read_frame_blocking(link)
        except BaseException:
            link.close()
            process.wait()
            raise
        if frame is None or frame[0] != kind:
            link.close()
            process.wait()
            if frame is None:
                raise ProcessEnded(
                    f"the model's process ended with {process.exit_status}",
                    hint="its output is above",
                )
            raise UserError(frame[1], hint=frame[2])
        return frame

    def _end(self) -> None:
        """End the process. Its running requests are lost."""
        if self._link:
            self._link.close()
        if self._process:
            self._end_process(self._process)

    def _end_process(self, process: ChildProcess) -> None:
        """Wait until a process whose link was closed has ended; kill it if that takes too long."""
        if not process.wait(EXIT_SECONDS):
            process.kill()
            process.wait()

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
            raise UpstreamKilled
        self._calls[self._n_calls] = queue
        self._writer.write(encode_frame(("open", self._n_calls, scope)))
        return self._n_calls, queue

    def _send(self, number: int, message: Message) -> None:
        """Send an ASGI message of a request to the process."""
        if self._writer is not None and number in self._calls:
            self._writer.write(encode_frame(("in", number, message)))

    def _close_call(self, number: int) -> None:
        """Report to the process that the client of a request has disconnected, and forget the
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
            assert self._process is not None
            self._process.kill()
        return why_killed

    async def _wait_for_exit(self) -> str:
        """Wait until the process has ended. Return the name of the signal that ended it, or its
        exit code.
        """
        assert self._process is not None
        process = self._process
        return await asyncio.to_thread(lambda: process.exit_status)

    def _fail_calls(self, reason: str, is_killed: bool = False) -> None:
        """End all running requests with UpstreamLost. `reason`: why the model is not available.
        `is_killed`: its process was ended from outside.
        """
        self._available.clear()
        self._reason = reason
        error = UpstreamKilled if is_killed else UpstreamLost
        for queue in self._calls.values():
            queue.put_nowait(error(reason))
        self._calls.clear()

    def _fail_lost_calls(self, why_killed: str, status: str) -> None:
        """End all running requests after the process has ended with `status`. `why_killed`: why this
        program has killed it; "" if it has not.
        """
        self._fail_calls(
            why_killed or f"its process ended ({status})",
            is_killed=not why_killed and status in OUTSIDE_SIGNALS,
        )
