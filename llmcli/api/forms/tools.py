"""Reads OpenAI's fields `tools` and `tool_choice`, and builds the constraint for tool calls."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from llmcli.api.errors import ApiError
from llmcli.api.fields import Fields, json_type
from llmcli.api.tool_calls.base import ToolCallFormat
from llmcli.errors import UserError
from llmcli.runtime.constraint import tool_calls
from llmcli.runtime.constraint.base import Constraint
from llmcli.runtime.constraint.tool_calls import AnswerSchema

MAX_TOOLS, MAX_NAME_LETTERS = 128, 64
TOOL_CHOICES = "none", "auto", "required"
ANY_PARAMETERS = {"type": "object", "properties": {}}
ANY_OBJECT = {"type": "object"}


@dataclass(frozen=True, slots=True)
class ToolDefinition:
    """A function that the model may call.

    `parameters`: the JSON schema of its arguments. `definition`: the object that templates expect.
    `is_strict`: the arguments must follow the schema even if no call is forced.
    """

    name: str
    parameters: Any
    definition: dict[str, Any]
    is_strict: bool = False


@dataclass(frozen=True, slots=True)
class ToolSet:
    """The functions that the model may call.

    `choice`: "none", "auto", "required", or the name of the function that must be called; in the
    last case `names_function` is true. `allows_parallel`: an answer may contain several calls.
    """

    tools: tuple[ToolDefinition, ...] = ()
    choice: str = "auto"
    names_function: bool = False
    allows_parallel: bool = True

    @property
    def names(self) -> frozenset[str]:
        """The names of the functions."""
        return frozenset(tool.name for tool in self.tools)

    @property
    def string_arguments(self) -> dict[str, frozenset[str]]:
        """For each function, the arguments that its schema declares as strings."""
        return {tool.name: frozenset(_string_arguments(tool.parameters)) for tool in self.tools}

    @property
    def is_forced(self) -> bool:
        """Whether the answer must contain a call."""
        return bool(self.tools) and (self.names_function or self.choice == "required")

    @property
    def is_strict(self) -> bool:
        """Whether any function is strict, so that a constraint is needed even if no call is
        forced.
        """
        return any(tool.is_strict for tool in self.tools)

    def constraint(
        self, call_format: ToolCallFormat, document: AnswerSchema | None = None
    ) -> Constraint:
        """Return the constraint for an answer that consists of calls in this format, whose
        arguments follow the functions' schemas. If `document` is a JSON schema, the answer may
        instead be a JSON document that follows it.

        Raises ApiError with the name of a strict function whose schema cannot be enforced.
        """
        opening, separator, closing = call_format.wrappers
        callable_tools = [
            tool for tool in self.tools if not self.names_function or tool.name == self.choice
        ]
        frames = tuple(call_format.forced_frame(tool.name) for tool in callable_tools)
        syntax = tool_calls.CallSyntax(
            opening,
            frames,
            separator if self.allows_parallel and not self.names_function else None,
            closing,
        )
        return _constraint(
            [AnswerSchema(tool.parameters, tool.is_strict, tool.name) for tool in callable_tools],
            [syntax],
            document,
        )

    def interleaved_constraint(self, call_format: ToolCallFormat) -> Constraint:
        """Return the constraint for a free text that may contain calls. From a call's opening mark
        on, the call must follow the schema of its function; for a function that is not strict, the
        arguments may be any JSON object. Raises ApiError if a schema cannot be enforced.
        """
        opening, separator, closing = call_format.wrappers
        frames_by_mark = [call_format.optional_frames(tool.name) for tool in self.tools]
        # without a separator, each call has its own mark
        has_separator = self.allows_parallel and bool(opening or call_format.ends_answer)
        syntaxes = [
            tool_calls.CallSyntax(
                opening,
                tuple(frames[mark] for frames in frames_by_mark),
                separator if has_separator else None,
                closing,
                mark,
            )
            for mark in frames_by_mark[0]
        ]
        functions = [
            AnswerSchema(
                tool.parameters if tool.is_strict else ANY_OBJECT, tool.is_strict, tool.name
            )
            for tool in self.tools
        ]
        return _constraint(
            functions,
            syntaxes,
            interleaved=tool_calls.InterleavedCalls(
                call_format.starts_answer, call_format.ends_answer, self.allows_parallel
            ),
        )


NO_TOOLS = ToolSet()


def _string_arguments(schema: Any) -> Iterator[str]:
    """Yield the names of the properties that an object's schema declares as strings."""
    properties = schema.get("properties") if isinstance(schema, dict) else None
    for name, property_schema in properties.items() if isinstance(properties, dict) else ():
        if isinstance(property_schema, dict) and property_schema.get("type") == "string":
            yield name


def _constraint(
    functions: Sequence[AnswerSchema],
    syntaxes: Sequence[tool_calls.CallSyntax],
    document: AnswerSchema | None = None,
    interleaved: tool_calls.InterleavedCalls | None = None,
) -> Constraint:
    """Return the compiled constraint for calls. A UserError becomes an ApiError for the field
    `tools`.
    """
    try:
        return tool_calls.tool_call_constraint(functions, syntaxes, document, interleaved)
    except UserError as error:
        raise ApiError(str(error), param="tools") from None


def read_tools(fields: Fields, is_nested: bool = True) -> ToolSet:
    """Return the functions in the fields `tools`, `tool_choice` and `parallel_tool_calls`.
    `is_nested`: a function is described in a field `function`, as in chat completions; the
    Responses API has no such field. Raises ApiError for invalid tools.
    """
    definitions = tuple(_read_tool(entry, is_nested) for entry in fields.tables("tools", MAX_TOOLS))
    names = [tool.name for tool in definitions]
    if len(set(names)) < len(names):
        duplicate = next(name for name in names if names.count(name) > 1)
        raise ApiError(f"tools has two functions called {duplicate!r}", param="tools")
    choice, named = _read_choice(fields, is_nested)
    if named and choice not in names:
        raise ApiError(
            f"tool_choice names the function {choice[:100]!r}, which is not in tools",
            param="tool_choice",
        )
    if choice == "required" and not named and not definitions:
        raise ApiError("tool_choice is required, but there are no tools", param="tool_choice")
    if choice == "none" and not named:
        definitions = ()
    return ToolSet(definitions, choice, named, fields.flag("parallel_tool_calls", True))


def _read_tool(fields: Fields, is_nested: bool) -> ToolDefinition:
    tool_type = fields.text("type", "function")
    if tool_type != "function":
        raise ApiError(
            f"{fields.path}: tools of type {str(tool_type)[:40]} are not supported; use functions",
            param=fields.path,
        )
    function = fields
    if is_nested:
        inner = fields.table("function")
        if inner is None:
            raise ApiError(
                f"{fields.path_of('function')} is missing", param=fields.path_of("function")
            )
        function = inner
    name = function.required_text("name")
    if not (
        0 < len(name) <= MAX_NAME_LETTERS
        and all(letter.isalnum() or letter in "_.-" for letter in name)
    ):
        raise function.type_error("name", f"1 to {MAX_NAME_LETTERS} letters, digits, _, - or .")
    parameters = function.values.get("parameters")
    if parameters is not None and not isinstance(parameters, dict):
        raise ApiError(
            f"{function.path_of('parameters')} must be a JSON schema, not {json_type(parameters)}",
            param=function.path_of("parameters"),
        )
    definition = {
        "name": name,
        "description": function.text("description", ""),
        "parameters": parameters or ANY_PARAMETERS,
    }
    strict = function.flag("strict")
    return ToolDefinition(
        name, parameters or ANY_PARAMETERS, {"type": "function", "function": definition}, strict
    )


def _read_choice(fields: Fields, is_nested: bool) -> tuple[str, bool]:
    """Return `tool_choice`, and whether it is the name of a function."""
    value = fields.values.get("tool_choice")
    if value is None:
        return "auto", False
    if isinstance(value, str):
        return fields.choice("tool_choice", TOOL_CHOICES, "auto"), False
    table = fields.table("tool_choice")
    assert table is not None
    if table.text("type") != "function":
        raise ApiError(
            "tool_choice takes none, auto, required, or one function", param="tool_choice"
        )
    inner = table.table("function") if is_nested else table
    return (inner or table).required_text("name"), True
