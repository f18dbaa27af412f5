"""Anthropic's fields `tools` and `tool_choice`.

Some tools have no schema in a request, because Claude knows them. Those that the client runs (a
shell, a text editor, a memory) get their schema here, so that any model can call them. Those that
Anthropic's server runs, such as a web search, are left out with a note.
"""

from collections.abc import Iterator
from typing import Any, ClassVar, Literal

from pydantic import model_validator

from llmcli.api.bodies.base import RequestBody, honored, ignored, missing, noted
from llmcli.api.bodies.generation_fields import OWN_CACHE
from llmcli.api.conversation.tool_fields import (
    JsonSchema,
    ToolName,
    define_function,
    left_out,
)
from llmcli.api.conversation.tools import ToolDefinition

FUNCTION_TYPES = (None, "custom", "function")
TOOL_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
TEXT, NUMBER = {"type": "string"}, {"type": "integer"}
PATH = {"type": "string", "description": "path of a file or folder"}
EDITING = {
    "path": PATH,
    "file_text": {"type": "string", "description": "text of a file to create"},
    "old_str": {"type": "string", "description": "text to replace"},
    "new_str": {"type": "string", "description": "text to put in its place"},
    "insert_line": {"type": "integer", "description": "line after which to insert"},
    "insert_text": {"type": "string", "description": "text to insert"},
    "view_range": {"type": "array", "items": NUMBER, "description": "first and last line"},
}


def _commands(*words: str) -> dict[str, Any]:
    return {"type": "string", "enum": list(words)}


# beginning of the type -> the description and the parameters of a tool that the client runs
CLIENT_TOOLS: dict[str, tuple[str, dict[str, Any]]] = {
    "bash_": (
        "Run a command in a shell, or restart the shell.",
        {
            "type": "object",
            "properties": {"command": TEXT, "restart": {"type": "boolean"}},
        },
    ),
    "text_editor_": (
        "View, create and edit text files.",
        {
            "type": "object",
            "properties": {
                "command": _commands("view", "create", "str_replace", "insert", "undo_edit"),
                **EDITING,
            },
            "required": ["command", "path"],
        },
    ),
    "memory_": (
        "Read and write files that are kept between conversations.",
        {
            "type": "object",
            "properties": {
                "command": _commands("view", "create", "str_replace", "insert", "delete", "rename"),
                **EDITING,
                "old_path": PATH,
                "new_path": PATH,
            },
            "required": ["command"],
        },
    ),
}


class AnthropicTool(RequestBody):
    """A tool. Those that Anthropic's server runs are left out."""

    origin: ClassVar[str] = "Anthropic"
    reports_unknown: ClassVar[bool] = False
    type: str | None = honored("custom, or the version of a tool that the client runs")
    name: ToolName | None = honored("1 to 128 letters, digits, _, - or .")
    description: str | None = honored("given to the model")
    input_schema: JsonSchema | None = honored("the JSON schema of the arguments")
    strict: bool | None = honored("the arguments follow the schema in every call")
    cache_control: Any = ignored(OWN_CACHE)
    defer_loading: Any = ignored("all tools are given to the model")
    input_examples: Any = noted("the model does not see them; write them into the description")

    @model_validator(mode="after")
    def _check(self) -> "AnthropicTool":
        if self.name is None and self.type in FUNCTION_TYPES:
            raise missing("name")
        return self

    def definitions(self, path: str, notes: list[str]) -> Iterator[ToolDefinition]:
        """Yield the definition of the tool, or append a note if it is left out. `path`: the tool's
        path in the request.
        """
        kind, description, schema = self.type, self.description, self.input_schema
        if kind not in FUNCTION_TYPES:
            beginning = next((word for word in CLIENT_TOOLS if str(kind).startswith(word)), None)
            if beginning is None or self.name is None:
                notes.append(left_out(path, kind))
                return
            description, schema = CLIENT_TOOLS[beginning]
        yield define_function(self.name or "", description, schema, bool(self.strict))


class AnthropicToolChoice(RequestBody):
    """Which tools the answer may or must call."""

    origin: ClassVar[str] = "Anthropic"
    type: Literal["auto", "any", "none", "tool"] | None = honored("auto, any, tool or none")
    name: str | None = honored("the tool that must be called")
    disable_parallel_tool_use: bool | None = honored("the answer has at most one call")

    @model_validator(mode="after")
    def _check(self) -> "AnthropicToolChoice":
        if self.type == "tool" and self.name is None:
            raise missing("name")
        return self

    def translated(self) -> dict[str, Any]:
        """Return the choice as fields of OpenAI's chat completions."""
        kind = self.type or "auto"
        choice: Any = (
            {"type": "function", "function": {"name": self.name}}
            if kind == "tool"
            else TOOL_CHOICES[kind]
        )
        return {
            "tool_choice": choice,
            "parallel_tool_calls": not self.disable_parallel_tool_use,
        }
