"""OpenAI's fields `tools`, `tool_choice` and `parallel_tool_calls`, as models of a request and as a
ToolSet (tools.py).

Agents list tools that only their usual server can run, such as a web search. Such a tool is left
out, and a note in the answer's metadata names it. A custom tool takes a text; the model sees it as
a function with the argument `input`. The tools of a namespace are functions whose names begin with
the name of the namespace.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal, Protocol

from pydantic import BeforeValidator, model_validator
from pydantic_core import core_schema

from llmcli.api.bodies.base import (
    Either,
    JsonObject,
    RequestBody,
    expected,
    honored,
    ignored,
    missing,
)
from llmcli.api.conversation.tools import (
    ANY_PARAMETERS,
    NAMESPACE_SEPARATOR,
    NO_TOOLS,
    ToolDefinition,
    ToolSet,
)
from llmcli.api.errors import ApiError
from llmcli.api.tool_calls.base import ToolCall, parse_arguments

MAX_TOOLS, MAX_NAME_LETTERS = 1024, 128  # Anthropic's limit for names
CHOICE_WORDS = "one of none, auto, required, or an object that names a tool"
CUSTOM_ARGUMENT = "input"
CUSTOM_PARAMETERS = {
    "type": "object",
    "properties": {CUSTOM_ARGUMENT: {"type": "string"}},
    "required": [CUSTOM_ARGUMENT],
    "additionalProperties": False,
}
JsonSchema = Annotated[dict[str, Any], JsonObject("a JSON schema")]


class NameValue:
    """Annotates the name of a function."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> core_schema.CoreSchema:
        return core_schema.no_info_after_validator_function(cls.check, handler(source))

    @staticmethod
    def check(name: str) -> str:
        """Return the name. Raises PydanticCustomError for a name that no API allows."""
        if not (
            0 < len(name) <= MAX_NAME_LETTERS
            and all(letter.isalnum() or letter in "_.-" for letter in name)
        ):
            raise expected(f"1 to {MAX_NAME_LETTERS} letters, digits, _, - or .")
        return name


ToolName = Annotated[str, NameValue]


class FunctionFields(RequestBody):
    """A function that the model may call."""

    origin: ClassVar[str] = "OpenAI"
    reports_unknown: ClassVar[bool] = False
    name: ToolName = honored("1 to 128 letters, digits, _, - or .", ...)
    description: str | None = honored("given to the model")
    parameters: JsonSchema | None = honored("the JSON schema of the arguments")
    strict: bool | None = honored("the arguments follow the schema in every call")


class CustomToolFields(RequestBody):
    """A tool that takes a text."""

    origin: ClassVar[str] = "OpenAI"
    reports_unknown: ClassVar[bool] = False
    name: ToolName = honored("1 to 128 letters, digits, _, - or .", ...)
    description: str | None = honored("given to the model")
    format: Any = honored("given to the model as a part of the description; it is not enforced")


class ChatTool(RequestBody):
    """A tool of a chat completion. A tool of another type than function or custom is left out."""

    origin: ClassVar[str] = "OpenAI"
    reports_unknown: ClassVar[bool] = False
    type: str | None = honored("function or custom")
    function: FunctionFields | None = honored("the function")
    custom: CustomToolFields | None = honored("the custom tool")

    @model_validator(mode="after")
    def _check(self) -> "ChatTool":
        for kind in ("function", "custom"):
            if (self.type or "function") == kind and getattr(self, kind) is None:
                raise missing(kind)
        return self

    def definitions(self, path: str, notes: list[str]) -> Iterator[ToolDefinition]:
        """Yield the definition of the tool, or append a note if it is left out. `path`: the tool's
        path in the request.
        """
        if self.type in (None, "function") and self.function is not None:
            function = self.function
            yield define_function(
                function.name, function.description, function.parameters, bool(function.strict)
            )
        elif self.type == "custom" and self.custom is not None:
            yield define_custom_tool(self.custom.name, self.custom.description, self.custom.format)
        else:
            notes.append(left_out(path, self.type))


class NamedTool(RequestBody):
    """The name of a tool."""

    origin: ClassVar[str] = "OpenAI"
    reports_unknown: ClassVar[bool] = False
    name: str = honored("the name of a tool in tools", ...)


class AllowedTool(RequestBody):
    """A tool that the model may call."""

    origin: ClassVar[str] = "OpenAI"
    reports_unknown: ClassVar[bool] = False
    type: str | None = honored("function or custom")
    name: str | None = honored("the name of a tool in tools")
    function: NamedTool | None = honored("the name of a function in tools")
    custom: NamedTool | None = honored("the name of a custom tool in tools")

    @property
    def tool_name(self) -> str | None:
        """The name of the tool, or None for a tool without a name, such as a web search."""
        named = self.function or self.custom
        return named.name if named else self.name


class AllowedTools(RequestBody):
    """The tools that the model may call, and whether it must call one."""

    origin: ClassVar[str] = "OpenAI"
    mode: Literal["auto", "required"] | None = honored("whether a tool must be called")
    tools: list[AllowedTool] | None = honored("the tools")


class ToolChoice(AllowedTools):
    """The choice of a single tool, or of some of the tools."""

    type: str | None = honored("function, custom or allowed_tools")
    name: str | None = honored("the name of the tool, in the Responses API")
    function: NamedTool | None = honored("the name of the function, in chat completions")
    custom: NamedTool | None = honored("the name of the custom tool, in chat completions")
    allowed_tools: AllowedTools | None = honored("the tools, in chat completions")

    @property
    def tool_name(self) -> str | None:
        """The name of the single tool that must be called, or None."""
        named = self.function or self.custom
        return named.name if named else self.name


def _read_choice(value: Any) -> Any:
    """Return "required" for "any", the word of Mistral's API, and any other value unchanged."""
    return "required" if value == "any" else value


ToolChoiceValue = Annotated[
    Literal["none", "auto", "required"] | ToolChoice,
    Either(CHOICE_WORDS),
    BeforeValidator(_read_choice),
]


class ToolFields(RequestBody):
    """The choice among tools, in all of OpenAI's APIs."""

    origin: ClassVar[str] = "OpenAI"
    tool_choice: ToolChoiceValue | None = honored(
        "none, auto, required (or any), a tool that must be called, or the tools that may be called"
    )
    parallel_tool_calls: bool | None = honored("whether an answer may have several calls")
    max_tool_calls: Any = ignored("it limits only tools that the server runs; there are none")


class RequestTool(Protocol):
    """A tool of a request, in any API."""

    def definitions(self, path: str, notes: list[str]) -> Iterator[ToolDefinition]:
        """Yield the definitions of the tool, or append a note if it is left out. `path`: the tool's
        path in the request.
        """


def define_tools(tools: Sequence[RequestTool] | None, notes: list[str]) -> list[ToolDefinition]:
    """Return the definitions of the tools in the field `tools`. Notes about tools that are left out
    are appended to `notes`.
    """
    return [
        definition
        for index, tool in enumerate(tools or ())
        for definition in tool.definitions(f"tools[{index}]", notes)
    ]


def define_function(
    name: str,
    description: str | None,
    parameters: dict[str, Any] | None,
    is_strict: bool = False,
    namespace: str = "",
) -> ToolDefinition:
    """Return the definition of a function. `parameters`: the JSON schema of its arguments.
    `namespace`: the name of its namespace, or "".
    """
    name = f"{namespace}{NAMESPACE_SEPARATOR}{name}" if namespace else name
    parameters = parameters or ANY_PARAMETERS
    definition = {"name": name, "description": description or "", "parameters": parameters}
    return ToolDefinition(
        name,
        parameters,
        {"type": "function", "function": definition},
        is_strict,
        namespace=namespace,
    )


def define_custom_tool(name: str, description: str | None, text_format: Any) -> ToolDefinition:
    """Return the definition of a custom tool as a function with one argument, a text.
    `text_format`: the field `format`, which describes the text.
    """
    texts = [text for text in (description, _describe_format(text_format)) if text]
    function = define_function(name, "\n\n".join(texts), CUSTOM_PARAMETERS)
    return replace(function, is_custom=True)


def _describe_format(text_format: Any) -> str:
    """Return the grammar of a custom tool's input as a sentence, or "" if there is none."""
    fields = text_format if isinstance(text_format, dict) else {}
    inner = fields.get("grammar")
    fields = inner if isinstance(inner, dict) else fields
    definition, syntax = fields.get("definition"), fields.get("syntax")
    if not isinstance(definition, str):
        return ""
    return f"The input follows this grammar ({syntax}):\n{definition}"


def left_out(path: str, kind: str | None) -> str:
    """Return the note about a tool that this server cannot offer to the model."""
    return f"{path} was left out: this server has no tool of type {str(kind)[:40]}"


def read_tools(
    definitions: Sequence[ToolDefinition],
    choice: Literal["none", "auto", "required"] | ToolChoice | None,
    allows_parallel: bool | None,
) -> ToolSet:
    """Return the tools that the model may call. Raises ApiError for two tools of the same name, and
    for the choice of a tool that does not exist.
    """
    names = [tool.name for tool in definitions]
    if len(set(names)) < len(names):
        duplicate = next(name for name in names if names.count(name) > 1)
        raise ApiError(f"tools has two functions called {duplicate!r}", param="tools")
    parallel = allows_parallel is not False
    if isinstance(choice, ToolChoice):
        return _choose(tuple(definitions), choice, parallel)
    if choice == "required" and not definitions:
        raise ApiError("tool_choice is required, but there are no tools", param="tool_choice")
    if choice == "none":
        return ToolSet(NO_TOOLS.tools, "none", allows_parallel=parallel)
    return ToolSet(tuple(definitions), choice or "auto", allows_parallel=parallel)


def _choose(tools: tuple[ToolDefinition, ...], choice: ToolChoice, parallel: bool) -> ToolSet:
    if choice.type == "allowed_tools":
        allowed = choice.allowed_tools or choice
        names = {tool.tool_name for tool in allowed.tools or ()}
        for name in sorted(name for name in names if name):
            _find_tool(tools, name)
        kept = tuple(tool for tool in tools if tool.name in names)
        if allowed.mode == "required" and not kept:
            raise ApiError("tool_choice is required, but it allows no tool", param="tool_choice")
        return ToolSet(kept, allowed.mode or "auto", allows_parallel=parallel)
    if choice.tool_name is None or choice.type not in ("function", "custom"):
        kind = str(choice.type)[:40]
        raise ApiError(
            f"tool_choice must be {CHOICE_WORDS}, not one of type {kind}", param="tool_choice"
        )
    return ToolSet(tools, _find_tool(tools, choice.tool_name).name, True, parallel)


def _find_tool(tools: Sequence[ToolDefinition], name: str) -> ToolDefinition:
    for tool in tools:
        if tool.name == name:
            return tool
    raise ApiError(
        f"tool_choice names the function {name[:100]!r}, which is not in tools",
        param="tool_choice",
    )


def custom_input(call: ToolCall) -> str:
    """Return the text that a call gives to a custom tool. Arguments that are cut off or are not
    those of a custom tool are returned as the model wrote them.
    """
    values = parse_arguments(call)
    value = values.get(CUSTOM_ARGUMENT) if values else None
    return value if isinstance(value, str) else call.arguments
