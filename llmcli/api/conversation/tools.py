"""The functions that a model may call, and the constraint for calls. tool_fields.py reads them from a
request.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from llmcli.api.errors import ApiError
from llmcli.api.tool_calls.base import ToolCallFormat
from llmcli.errors import UserError
from llmcli.runtime.constraint import tool_calls
from llmcli.runtime.constraint.base import Constraint
from llmcli.runtime.constraint.tool_calls import AnswerSchema

NAMESPACE_SEPARATOR = "__"  # between the names of a namespace and of its function
ANY_PARAMETERS = {"type": "object", "properties": {}}
ANY_OBJECT = {"type": "object"}


@dataclass(frozen=True, slots=True)
class ToolDefinition:
    """A function that the model may call.

    `parameters`: the JSON schema of its arguments. `definition`: the object that templates expect.
    `is_strict`: the arguments must follow the schema even if no call is forced. `is_custom`: for
    the client it is a custom tool, whose only argument is a text. `namespace`: the namespace that
    precedes its name, or "".
    """

    name: str
    parameters: Any
    definition: dict[str, Any]
    is_strict: bool = False
    is_custom: bool = False
    namespace: str = ""

    @property
    def own_name(self) -> str:
        """The name without the namespace."""
        return self.name.removeprefix(f"{self.namespace}{NAMESPACE_SEPARATOR}")


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

    def find(self, name: str) -> ToolDefinition | None:
        """Return the tool with this name, or None."""
        return next((tool for tool in self.tools if tool.name == name), None)

    def is_custom(self, name: str) -> bool:
        """Return whether the tool with this name is a custom tool for the client."""
        tool = self.find(name)
        return tool is not None and tool.is_custom

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
