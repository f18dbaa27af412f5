"""The options about tools of `chat` and `run`."""

from dataclasses import fields
from typing import Annotated

import typer

from llmcli.chat.tools.tool_request import ToolRequest
from llmcli.commands.command_line import panels
from llmcli.commands.options.groups import option_group

ToolOptions = Annotated[
    ToolRequest,
    option_group(
        panels.TOOLS,
        mcp=typer.Option(
            "--mcp",
            metavar="FILE",
            help='Let the model call tools of the MCP servers in this file: {"mcpServers": {...}}.',
        ),
        allow_tool=typer.Option(
            "--allow-tool",
            metavar="NAME",
            help="Call this tool without asking; SERVER/* for all of a server, * for all; "
            "repeatable.",
        ),
        tool_timeout=typer.Option(
            "--tool-timeout", metavar="SECONDS", help="How long a call of a tool may take."
        ),
        tool_start_timeout=typer.Option(
            "--tool-start-timeout", metavar="SECONDS", help="How long a server may take to start."
        ),
        tool_output=typer.Option(
            "--tool-output", metavar="BYTES", help="How much of a result the model receives."
        ),
        tool_rounds=typer.Option(
            "--tool-rounds", metavar="N", help="How many times an answer may call tools."
        ),
    ),
]


def list_tool_flags(tools: ToolRequest) -> list[str]:
    """Return the options about tools that have been given."""
    values = ((field, getattr(tools, field.name)) for field in fields(tools))
    return [
        f"--{field.name.replace('_', '-')}"
        for field, value in values
        if value != field.default and value != []
    ]
