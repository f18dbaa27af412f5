"""Opens the tools of a chat as the options of `chat` and `run` ask for them."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from llmcli.chat.tools.chat_tools import AskUser, ChatTools
from llmcli.chat.tools.tool_request import ToolRequest
from llmcli.config import Config
from llmcli.errors import UserError
from llmcli.text_input import expand_path
from llmcli.ui import UI


@contextmanager
def open_tools(
    request: ToolRequest, config: Config, ui: UI, ask_user: AskUser | None
) -> Iterator[ChatTools | None]:
    """Start the tool servers of `request` for the block, and yield their tools; None without `mcp`.
    Print a warning for each server that does not start and each tool that is left out.

    Raises UserError if the file is wrong, no server starts, or a tool to allow does not exist.
    """
    if request.mcp is None:
        yield None
        return
    # these imports are slow
    from llmcli.tool_servers.server_file import read_servers
    from llmcli.tool_servers.server_pool import ToolServers

    path = expand_path(request.mcp)
    servers = read_servers(path)
    if not servers:
        raise UserError(f"{path} has no tool servers", hint="add one, or leave out --mcp")
    remote = [server.name for server in servers if not server.is_local]
    if config.offline and remote:
        raise UserError(
            f"offline: the tool server {remote[0]} is on another machine",
            hint='leave out --offline, or add "disabled": true to it',
        )
    with ExitStack() as stack:
        with ui.status(f"starting the tool servers of {path.name} …"):
            pool = stack.enter_context(ToolServers(servers, request.limits()))
        failed = [state for state in pool.states if state.state != "ready"]
        for state in failed:
            ui.warn(f"tool server {state.server.name}: {state.problem}")
        for tool in pool.omitted:
            ui.warn(f"tool {tool.name} of {tool.server} is left out: {tool.reason}")
        if len(failed) == len(servers):
            raise UserError(
                "no tool server has started", hint=f"try the commands of {path} in a shell"
            )
        tools = ChatTools(pool, ui, ask_user)
        for pattern in request.allow_tool or ():
            tools.set_allowance(pattern, "allow")
        yield tools
