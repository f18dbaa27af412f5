"""A connection to one tool server: the handshake, its list of tools, and calls.

This folder is the only one that imports the package `mcp`. The client offers no abilities to a
server, so requests for folders (roots), for answers of the model (sampling) and for input of the
user (elicitation) are declined. Everything that a server sends is read as plain JSON values and
checked by llmcli.
"""

import logging
from contextlib import AbstractAsyncContextManager
from typing import Any, Literal

import anyio
from mcp.client.session import ClientSession
from mcp.shared.exceptions import MCPError
from mcp.shared.jsonrpc_dispatcher import JSONRPCDispatcher
from mcp_types import PARSE_ERROR, Implementation

from llmcli import __version__
from llmcli.tool_servers.limits import ToolLimits
from llmcli.tool_servers.protocol.channel import INVALID_ANSWER, Channel, shorten_reason
from llmcli.tool_servers.protocol.http_transport import open_url
from llmcli.tool_servers.protocol.stdio_transport import Streams, open_program
from llmcli.tool_servers.server_file import ToolServer
from llmcli.tool_servers.tool_list import MAX_TOOLS, ToolList, check_tools
from llmcli.tool_servers.tool_result import ToolResult, bound_text, read_result

MAX_PAGES = 20  # of a list of tools

# The library logs the errors of servers with tracebacks; `problem` has them in one line.
for _name in ("mcp", "client", "httpx2"):
    logging.getLogger(_name).addHandler(logging.NullHandler())
    logging.getLogger(_name).propagate = False


class ServerConnection:
    """A connection to a server, used by the tasks of one event loop.

    - `tools`: the tools of the server, as it listed them at its start. Later changes are ignored:
      a tool that the user has allowed must stay what it was.
    """

    def __init__(self, server: ToolServer, limits: ToolLimits) -> None:
        self.server, self.limits = server, limits
        self.tools = ToolList()
        self.channel = Channel()
        self.started = anyio.Event()
        self._dispatcher: JSONRPCDispatcher[Any] | None = None

    @property
    def state(self) -> Literal["starting", "ready", "ended"]:
        """What the server does."""
        if self.channel.has_ended:
            return "ended"
        return "ready" if self.started.is_set() else "starting"

    @property
    def problem(self) -> str:
        """Why the connection has ended; "" if it was closed, or is open."""
        return self.channel.reason

    async def run(self) -> None:
        """Connect, list the tools, and stay connected until the end. Raises no errors of the
        server or the network: they are in `problem`.
        """
        try:
            async with self._open_transport() as (read, write):
                self._dispatcher = JSONRPCDispatcher(read, write)
                info = Implementation(name="llmcli", version=__version__)
                async with ClientSession(dispatcher=self._dispatcher, client_info=info) as session:
                    await self._prepare(session)
                    self.started.set()
                    await self.channel.wait_for_end()
        except Exception as error:  # noqa: BLE001 - whatever a server or the library does wrong
            self.channel.end(self._describe(error))
        finally:
            self.channel.end()
            self._dispatcher = None
            self.started.set()

    def close(self) -> None:
        """End the connection. `run` then returns."""
        self.channel.end()

    async def call(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        """Call a tool by its name on the server. An error of any kind is a result."""
        if self._dispatcher is None:
            return self._error(f"the server has ended: {self.problem or 'it was closed'}")
        self.channel.begin_request()
        params = {"name": name, "arguments": arguments}
        try:
            with anyio.fail_after(self.limits.call_seconds):
                result = await self._dispatcher.send_raw_request("tools/call", params)
        except TimeoutError:
            return self._error(f"no result within {self.limits.call_seconds:g} s")
        except MCPError as error:
            return self._error(
                f"the server has ended: {self.problem}" if self.problem else _describe_answer(error)
            )
        except Exception as error:  # noqa: BLE001 - as in `run`
            return self._error(self._describe(error))
        return read_result(result, self.limits.output_bytes)

    async def _prepare(self, session: ClientSession) -> None:
        """Do the handshake, and list the tools. Raises what the server does wrong, after recording
        it: the end of the transport would be another reason.
        """
        try:
            with anyio.fail_after(self.limits.start_seconds):
                await session.initialize()
                self.tools = check_tools(self.server.name, await self._list_tools())
        except Exception as error:
            self.channel.end(self._describe(error))
            raise

    def _open_transport(self) -> AbstractAsyncContextManager[Streams]:
        if self.server.url:
            return open_url(self.server, self.channel, self.limits)
        return open_program(self.server, self.channel)

    async def _list_tools(self) -> list[Any]:
        """Return the tools of all pages of the server's list, one more than allowed at most."""
        assert self._dispatcher
        tools: list[Any] = []
        cursor: Any = None
        for _ in range(MAX_PAGES):
            params = {} if cursor is None else {"cursor": cursor}
            page = await self._dispatcher.send_raw_request("tools/list", params)
            listed = page.get("tools")
            if not isinstance(listed, list):
                raise ValueError("its list of tools is not a list")
            tools += listed
            cursor = page.get("nextCursor")
            if not isinstance(cursor, str) or len(tools) > MAX_TOOLS:
                break
        return tools[: MAX_TOOLS + 1]

    def _error(self, text: str) -> ToolResult:
        return bound_text(text, self.limits.output_bytes, is_error=True)

    def _describe(self, error: BaseException) -> str:
        """Return why a connection or a call failed, as one line."""
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        if isinstance(error, TimeoutError) and self.state == "starting":
            return f"it did not answer within {self.limits.start_seconds:g} s"
        if isinstance(error, FileNotFoundError | PermissionError | NotADirectoryError):
            return f"cannot start {error.filename or self.server.command}: {error.strerror}"
        if isinstance(error, MCPError):
            return _describe_answer(error)
        if hasattr(error, "errors") and isinstance(error, ValueError):  # of pydantic
            return INVALID_ANSWER
        return shorten_reason(str(error)) or type(error).__name__


def _describe_answer(error: MCPError) -> str:
    """Return the text of an error that a server, or the package `mcp`, has given as an answer."""
    if error.code == PARSE_ERROR and error.message.startswith("Failed to parse"):
        return INVALID_ANSWER  # instead of many lines of pydantic
    return error.message
