"""Runs all tool servers of a chat in an event loop of its own thread, and waits for their answers.

The package `mcp` is the extra `mcp`. It is imported when the first pool is opened.
"""

import asyncio
import importlib.util
import shlex
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from llmcli.errors import UserError
from llmcli.runtime.interrupt import allow_interrupts, defer_interrupts
from llmcli.tool_servers.limits import ToolLimits
from llmcli.tool_servers.server_file import ToolServer
from llmcli.tool_servers.tool_list import OmittedTool, ServerTool, join_lists
from llmcli.tool_servers.tool_result import ToolResult
from quant.installation import SETUP_SCRIPT, installer, is_checkout

if TYPE_CHECKING:
    from llmcli.tool_servers.protocol.connection import ServerConnection

T = TypeVar("T")
POLL_SECONDS = 0.2  # how often a waiting thread looks whether it should stop
CLOSE_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class ServerState:
    """A server, and what it does: "starting", "ready" or "ended". `problem`: why it has ended.
    `n_stray_lines`: lines that it has written to its standard output beside messages.
    """

    server: ToolServer
    state: str
    problem: str
    n_stray_lines: int


def require_mcp() -> None:
    """Raise UserError with the command that installs the package `mcp` if it is missing."""
    if any(importlib.util.find_spec(name) is None for name in ("mcp", "jsonschema")):
        raise UserError(
            "tools need the package mcp, which is not installed",
            hint=f"{SETUP_SCRIPT} --all"
            if is_checkout()
            else f"{installer()} {shlex.quote('llmcli[mcp]')}",
        )


class ToolServers:
    """The running tool servers. Use it in a `with` block, which starts and ends them.

    `tools`: the tools of all servers that have started, with unique names. `omitted`: tools that
    are left out.
    """

    def __init__(self, servers: Sequence[ToolServer], limits: ToolLimits) -> None:
        require_mcp()
        self.limits = limits
        self.tools: tuple[ServerTool, ...] = ()
        self.omitted: tuple[OmittedTool, ...] = ()
        self._servers = servers
        self._connections: dict[str, ServerConnection] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="tools", daemon=True)

    def __enter__(self) -> "ToolServers":
        self._thread.start()
        try:
            self._wait(self._start())
        except BaseException:
            self.close()
            raise
        tool_list = join_lists([c.tools for c in self._connections.values()])
        self.tools, self.omitted = tool_list.tools, tool_list.omitted
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def states(self) -> list[ServerState]:
        """The states of all servers, in the order of the file."""
        return [
            ServerState(c.server, c.state, c.problem, c.channel.n_stray_lines)
            for c in self._connections.values()
        ]

    def call(
        self,
        tool: ServerTool,
        arguments: dict[str, Any],
        should_stop: Callable[[], bool] = lambda: False,
    ) -> ToolResult:
        """Call a tool and wait for its result. Any failure is a result, too.

        Raises KeyboardInterrupt after Ctrl-C, and if `should_stop` returns true; the server then
        gets a notification that the call is cancelled.
        """
        return self._wait(
            self._connections[tool.server].call(tool.own_name, arguments), should_stop
        )

    def close(self) -> None:
        """End all servers, and the thread. A Ctrl-C takes effect after that."""
        if self._loop.is_closed():
            return
        with defer_interrupts():
            # a server that cannot be ended stays behind
            with suppress(FutureTimeout, CancelledError):
                asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(CLOSE_SECONDS)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    async def _start(self) -> None:
        """Start all servers at once, and wait until each is ready or has failed."""
        from llmcli.tool_servers.protocol.connection import ServerConnection

        for server in self._servers:
            connection = ServerConnection(server, self.limits)
            self._connections[server.name] = connection
            task = asyncio.create_task(connection.run())
            self._tasks.add(task)
        for connection in self._connections.values():
            await connection.started.wait()

    async def _end(self) -> None:
        for connection in self._connections.values():
            connection.close()
        if self._tasks:
            _, running = await asyncio.wait(self._tasks, timeout=CLOSE_SECONDS - 1)
            for task in running:
                task.cancel()
            await asyncio.sleep(0)
        await self._loop.shutdown_asyncgens()

    def _wait(
        self,
        coroutine: Coroutine[Any, Any, T],
        should_stop: Callable[[], bool] = lambda: False,
    ) -> T:
        """Run a coroutine in the loop, and return its result. Raises KeyboardInterrupt as `call`
        does; the coroutine is then cancelled.
        """
        future: Future[T] = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            with allow_interrupts():
                while True:
                    try:
                        return future.result(POLL_SECONDS)
                    except FutureTimeout:
                        if should_stop():
                            raise KeyboardInterrupt from None
        except BaseException:
            future.cancel()
            raise
