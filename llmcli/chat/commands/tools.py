"""/tools: lists the tools and their servers, and sets which tools are called without asking."""

from collections.abc import Iterable

from llmcli.chat.chat_session import ChatSession
from llmcli.chat.commands.base import ReplCommand
from llmcli.chat.display.tree_drawing import shorten
from llmcli.chat.tools.chat_tools import Allowance, ChatTools
from llmcli.errors import UserError
from llmcli.units import format_count

DESCRIPTION_CHARACTERS = 60
MEANINGS: dict[Allowance, str] = {
    "ask": "asks before each call",
    "allow": "is called without asking",
    "deny": "is not offered to the model",
}


def show_or_set_tools(chat: ChatSession, argument: str) -> None:
    """List the tools, their servers and allowances; allow or deny tools.

    `/tools allow NAME` calls a tool without asking, `/tools deny NAME` does not offer it to the
    model, and `/tools ask NAME` asks before each call, as at the start. NAME is a tool, `SERVER/*`
    for all tools of a server, or `*` for all.
    """
    if chat.tools is None:
        chat.model.require_runner()
        raise UserError("this chat has no tools", hint="start one with: llmcli chat --mcp FILE")
    words = argument.split()
    if not words:
        _list_tools(chat, chat.tools)
        return
    allowance = next((value for value in MEANINGS if value == words[0]), None)
    if allowance is None or len(words) < 2:
        raise UserError(
            f"/tools {argument}: unknown argument", hint="/tools, or /tools allow|deny|ask NAME"
        )
    for pattern in words[1:]:
        for name in chat.tools.set_allowance(pattern, allowance):
            chat.ui.text(f"{name}: {MEANINGS[allowance]}")


def _list_tools(chat: ChatSession, tools: ChatTools) -> None:
    servers = tools.servers
    chat.ui.table(
        ("server", "state", "address"),
        [
            (
                state.server.name,
                state.state + (f": {state.problem}" if state.problem else ""),
                state.server.address,
            )
            for state in servers.states
        ],
    )
    chat.ui.table(
        ("tool", "server", "", "description"),
        [
            (
                tool.name,
                tool.server,
                tools.allowances[tool.name],
                shorten(tool.description, DESCRIPTION_CHARACTERS),
            )
            for tool in servers.tools
        ],
    )
    for tool in servers.omitted:
        chat.ui.text(f"left out: {tool.name} of {tool.server}: {tool.reason}")
    for state in servers.states:
        if state.n_stray_lines:
            chat.ui.text(
                f"{state.server.name} has written {format_count(state.n_stray_lines, 'line')} to "
                "its standard output that are no messages"
            )


def _complete_word(chat: ChatSession) -> Iterable[str]:
    return MEANINGS if chat.tools else ()


def _complete_names(chat: ChatSession, words: list[str]) -> Iterable[str]:
    return chat.tools.allowances if chat.tools and words[0] in MEANINGS else ()


COMMANDS = (
    ReplCommand(
        "tools",
        show_or_set_tools,
        "[allow|deny|ask NAME …]",
        first_completions=_complete_word,
        later_completions=_complete_names,
        group="model and settings",
    ),
)
