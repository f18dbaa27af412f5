"""Checks the list of tools that a server sends. A tool that breaks a rule is left out, with a
reason.

The only module that imports jsonschema. No pattern of a schema is ever matched here, and no
reference is followed.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from llmcli.tool_servers.tool_result import clean_text

MAX_TOOLS = 128  # of one server
MAX_NAME_CHARACTERS = 128
MAX_CALLED_NAME = 64  # of the name that the model writes, as in OpenAI's API
MAX_DESCRIPTION_CHARACTERS = 8192
MAX_SCHEMA_BYTES = 32_768
MAX_SCHEMA_DEPTH = 32
NAME_SEPARATOR = "__"  # between the names of a server and of its tool
UNUSUAL_CHARACTERS = re.compile(r"[^A-Za-z0-9_-]")


class InvalidTool(ValueError):
    """Raised for a tool that is left out. Its text says why."""


@dataclass(frozen=True, slots=True)
class ServerTool:
    """A tool of a server. `name`: the name that the model writes. `own_name`: its name on the
    server. `schema`: the JSON schema of its arguments.
    """

    server: str
    name: str
    own_name: str
    description: str
    schema: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class OmittedTool:
    """A tool that is left out. `name`: its name on the server, shortened."""

    server: str
    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class ToolList:
    """The tools of servers, and those that were left out."""

    tools: tuple[ServerTool, ...] = ()
    omitted: tuple[OmittedTool, ...] = ()


def check_tools(server: str, listed: Sequence[Any]) -> ToolList:
    """Return the tools in a list that the server `server` has sent."""
    tools: dict[str, ServerTool] = {}
    omitted = []
    for value in listed[:MAX_TOOLS]:
        label = _label(value)
        try:
            tool = _check_tool(server, value)
            if tool.name in tools:
                raise InvalidTool("the server has two tools of this name")
        except InvalidTool as error:
            omitted.append(OmittedTool(server, label, str(error)))
        else:
            tools[tool.name] = tool
    omitted += [
        OmittedTool(server, _label(value), f"the server has more than {MAX_TOOLS} tools")
        for value in listed[MAX_TOOLS : MAX_TOOLS + 1]
    ]
    return ToolList(tuple(tools.values()), tuple(omitted))


def join_lists(lists: Sequence[ToolList]) -> ToolList:
    """Return the tools of several servers. Names that two servers share get the server's name as a
    prefix. A tool whose name is then still not unique is left out.
    """
    names = [tool.name for tool_list in lists for tool in tool_list.tools]
    shared = {name for name in names if names.count(name) > 1}
    tools: dict[str, ServerTool] = {}
    omitted = [tool for tool_list in lists for tool in tool_list.omitted]
    # tools that keep their name come first, so that no other server can take it
    candidates = sorted(
        (tool for tool_list in lists for tool in tool_list.tools),
        key=lambda tool: tool.name in shared,
    )
    for tool in candidates:
        name = tool.name
        if name in shared:
            name = _called_name(f"{tool.server}{NAME_SEPARATOR}{name}")
        if name in tools:
            omitted.append(OmittedTool(tool.server, tool.own_name, "its name is not unique"))
        else:
            tools[name] = replace(tool, name=name)
    return ToolList(tuple(tools.values()), tuple(omitted))


def _label(value: Any) -> str:
    name = value.get("name") if isinstance(value, dict) else None
    return clean_text(name[:60]) if isinstance(name, str) and name else "a tool without a name"


def _called_name(name: str) -> str:
    return UNUSUAL_CHARACTERS.sub("_", name)[:MAX_CALLED_NAME]


def _check_tool(server: str, value: Any) -> ServerTool:
    """Return the tool that a JSON value describes. Raises InvalidTool."""
    if not isinstance(value, dict):
        raise InvalidTool("it is not an object")
    name, description = value.get("name"), value.get("description")
    if not isinstance(name, str) or not name.strip():
        raise InvalidTool("it has no name")
    if len(name) > MAX_NAME_CHARACTERS:
        raise InvalidTool(f"its name has more than {MAX_NAME_CHARACTERS} characters")
    if clean_text(name) != name:
        raise InvalidTool("its name has control characters")
    if description is not None and not isinstance(description, str):
        raise InvalidTool("its description is not a text")
    if len(description or "") > MAX_DESCRIPTION_CHARACTERS:
        raise InvalidTool(
            f"its description has more than {MAX_DESCRIPTION_CHARACTERS:,} characters"
        )
    schema = check_schema(value.get("inputSchema"))
    return ServerTool(server, _called_name(name), name, clean_text(description or ""), schema)


def check_schema(schema: Any) -> dict[str, Any]:
    """Return a value that is a JSON schema of an object. Raises InvalidTool if it is none, or is too
    large.
    """
    if not isinstance(schema, dict):
        raise InvalidTool("its schema is not an object")
    _check_depth(schema)
    try:
        raw = json.dumps(schema, ensure_ascii=False, allow_nan=False).encode()
    except ValueError:
        raise InvalidTool("its schema has a number or a text that JSON cannot have") from None
    if len(raw) > MAX_SCHEMA_BYTES:
        raise InvalidTool(f"its schema has more than {MAX_SCHEMA_BYTES:,} bytes")
    if schema.get("type", "object") != "object":
        raise InvalidTool("its schema is not that of an object")
    from jsonschema import Draft202012Validator, SchemaError

    try:
        Draft202012Validator.check_schema(schema)
    except SchemaError as error:
        place = ".".join(map(str, error.absolute_path)) or "its root"
        raise InvalidTool(f"its schema is invalid at {clean_text(place[:100])}") from None
    return schema


def _check_depth(value: Any) -> None:
    """Raise InvalidTool if a value is nested too deeply."""
    level, depth = [value], 0
    while level:
        depth += 1
        if depth > MAX_SCHEMA_DEPTH:
            raise InvalidTool(f"its schema is nested more than {MAX_SCHEMA_DEPTH} levels deep")
        level = [
            child
            for item in level
            for child in (
                item.values() if isinstance(item, dict) else item if isinstance(item, list) else ()
            )
            if isinstance(child, dict | list)
        ]
