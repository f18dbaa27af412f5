"""The tools of a chat: which the model may call, whether the user is asked first, and the calls."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Literal

from llmcli.chat.conversation.tool_steps import CallRecord
from llmcli.chat.display.stream_writer import print_dimmed
from llmcli.errors import UserError
from llmcli.tool_servers.tool_result import ToolResult
from llmcli.ui import UI
from llmcli.units import format_count

if TYPE_CHECKING:
    from llmcli.api.conversation.tools import ToolSet
    from llmcli.api.tool_calls.base import ToolCall
    from llmcli.tool_servers.server_pool import ToolServers
    from llmcli.tool_servers.tool_list import ServerTool

Allowance = Literal["ask", "allow", "deny"]
Permission = Literal["once", "always", "no"]
AskUser = Callable[[str], Permission]  # shows a question, and returns the user's answer
MAX_CALLS = 16  # that a model makes at once, before it reads their results
SHOWN_LINES, SHOWN_COLUMNS = 8, 200  # of a result
SHOWN_ARGUMENTS = 4000  # characters of the arguments of a call
SHOWN_NAME = 60  # characters of a tool's name that the model has made up
NO_TERMINAL = "not called: the user has not allowed this tool"


class ChatTools:
    """The tools of a chat. `ask_user`: asks the user before a call; None without a terminal, where
    only allowed tools are called. `allowances`: what the user has decided about each tool, by its
    name.
    """

    def __init__(self, servers: "ToolServers", ui: UI, ask_user: AskUser | None) -> None:
        self.servers, self.ui, self.ask_user = servers, ui, ask_user
        self.allowances: dict[str, Allowance] = {tool.name: "ask" for tool in servers.tools}

    @property
    def offered_names(self) -> tuple[str, ...]:
        """The names of the tools that the model may call: all that are not denied."""
        return tuple(name for name, value in self.allowances.items() if value != "deny")

    @property
    def max_rounds(self) -> int:
        """How many times an answer may call tools."""
        return self.servers.limits.rounds

    def set_allowance(self, pattern: str, allowance: Allowance) -> list[str]:
        """Set the allowance of a tool, of all tools of a server (`SERVER/*`) or of all (`*`).
        Return their names. Raises UserError if there is no such tool.
        """
        names = [
            tool.name
            for tool in self.servers.tools
            if tool.name == pattern or fnmatchcase(f"{tool.server}/{tool.name}", pattern)
        ]
        if not names:
            known = ", ".join(self.allowances) or "none"
            raise UserError(f"there is no tool {pattern!r}", hint=f"the tools are: {known}")
        self.allowances.update(dict.fromkeys(names, allowance))
        return names

    def tool_set(self) -> "ToolSet":
        """Return the definitions of the tools that the model may call."""
        # imported here because pydantic delays the start
        from llmcli.api.conversation.tool_fields import define_function
        from llmcli.api.conversation.tools import ToolSet

        offered = frozenset(self.offered_names)
        return ToolSet(
            tuple(
                define_function(tool.name, tool.description, dict(tool.schema))
                for tool in self.servers.tools
                if tool.name in offered
            )
        )

    def run_calls(
        self, calls: "Sequence[ToolCall]", should_stop: Callable[[], bool]
    ) -> Iterable[CallRecord]:
        """Make the calls of an answer one after the other, and yield them with their results.
        Raises KeyboardInterrupt if the user stops one.
        """
        for number, call in enumerate(calls):
            if number >= MAX_CALLS:
                result = self._refuse(call, f"not called: at most {MAX_CALLS} calls at once")
            else:
                result = self._run_call(call, should_stop)
            yield CallRecord(call.id, call.name, call.arguments, result.text, result.is_error)

    def _run_call(self, call: "ToolCall", should_stop: Callable[[], bool]) -> ToolResult:
        from llmcli.api.tool_calls.base import parse_arguments

        tool = next((tool for tool in self.servers.tools if tool.name == call.name), None)
        arguments = parse_arguments(call)
        if tool is None or self.allowances[tool.name] == "deny":
            names = ", ".join(self.offered_names)
            return self._refuse(
                call, f"there is no tool {call.name[:SHOWN_NAME]!r}; the tools are: {names}"
            )
        if arguments is None:
            return self._refuse(call, "not called: the arguments are not a JSON object")
        print_dimmed(self.ui, f"[tool {describe_call(tool, arguments)}]")
        if self.allowances[tool.name] == "ask" and (refusal := self._ask(tool)):
            return ToolResult(refusal, is_error=True)
        with self.ui.status(f"{tool.name} runs …"):
            result = self.servers.call(tool, arguments, should_stop)
        self._show_result(tool, result)
        return result

    def _refuse(self, call: "ToolCall", reason: str) -> ToolResult:
        self.ui.note(f"tool {call.name[:SHOWN_NAME]}: {reason}")
        return ToolResult(reason, is_error=True)

    def _ask(self, tool: "ServerTool") -> str:
        """Ask the user whether a tool may be called. Return "", or why it may not."""
        if self.ask_user is None:
            self.ui.note(f"{NO_TERMINAL}; --allow-tool {tool.name} allows it")
            return NO_TERMINAL
        permission = self.ask_user(f"call {tool.name}? [y]es, [n]o, [a]lways: ")
        if permission == "always":
            self.allowances[tool.name] = "allow"
        return "not called: the user refused it" if permission == "no" else ""

    def _show_result(self, tool: "ServerTool", result: ToolResult) -> None:
        """Print the beginning of a result, with a mark before each line, which shows that the line
        is not the model's.
        """
        lines = result.text.split("\n")
        size = format_count(len(result.text.encode()), "byte")
        kind = "error" if result.is_error else "output"
        cut = f", {result.n_left_out:,} left out" if result.n_left_out else ""
        print_dimmed(self.ui, f"[{kind} of {tool.name}, {size}{cut}]")
        for line in lines[:SHOWN_LINES]:
            shown = line if len(line) <= SHOWN_COLUMNS else f"{line[:SHOWN_COLUMNS]}…"
            print_dimmed(self.ui, f"│ {shown}")
        if len(lines) > SHOWN_LINES:
            print_dimmed(self.ui, f"│ … {format_count(len(lines) - SHOWN_LINES, 'more line')}")


def describe_call(tool: "ServerTool", arguments: Mapping[str, Any]) -> str:
    """Return a call as one line: server, name, and the arguments exactly as the server gets them."""
    text = json.dumps(arguments, ensure_ascii=False)
    if len(text) > SHOWN_ARGUMENTS:
        text = f"{text[:SHOWN_ARGUMENTS]}… ({len(text):,} characters)"
    return f"{tool.server}: {tool.own_name}({text})"
