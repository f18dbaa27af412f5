"""Tool definitions and tool_choice: reads OpenAI's fields, describes the tools to the model, and
builds the constraint of forced calls.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from llmcli.api.errors import Problem
from llmcli.api.fields import Fields, kind
from llmcli.api.tool_calls.base import Family
from llmcli.errors import UserError
from llmcli.runtime.constraint import tool_calls
from llmcli.runtime.constraint.base import Constraint
from llmcli.types import Message

MOST, LONGEST = 128, 64
WORDS = "none", "auto", "required"
ANYTHING = {"type": "object", "properties": {}}
OBJECT = {"type": "object"}
# The prompt for models whose template has no tools: Hermes's text, which most models have seen in
# training.
TOLD = (
    "You may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n"
    "<tools>\n{}\n</tools>\n\n"
    "For each function call, return a JSON object with function name and arguments within "
    "<tool_call></tool_call> XML tags:\n"
    '<tool_call>\n{{"name": <function-name>, "arguments": <arguments-object>}}\n</tool_call>'
)


@dataclass(frozen=True, slots=True)
class Tool:
    """A function: its name, its argument schema, and its definition as templates receive it.
    `is_strict`: its arguments must follow `parameters`.
    """

    name: str
    parameters: Any
    shown: dict[str, Any]
    strict: bool = False


@dataclass(frozen=True, slots=True)
class Tools:
    """The functions that the model may call. `choice` is none, auto, required, or the name of the
    one function that must be called (`names_function`).
    """

    tools: tuple[Tool, ...] = ()
    choice: str = "auto"
    named: bool = False
    parallel: bool = True

    @property
    def names(self) -> frozenset[str]:
        """Names of the functions."""
        return frozenset(tool.name for tool in self.tools)

    @property
    def texts(self) -> dict[str, frozenset[str]]:
        """For each function, the arguments that are strings by its schema."""
        return {tool.name: frozenset(_string_arguments(tool.parameters)) for tool in self.tools}

    @property
    def forced(self) -> bool:
        """Whether the answer must be a call."""
        return bool(self.tools) and (self.named or self.choice == "required")

    @property
    def strict(self) -> bool:
        """Whether calls that the model decides to make must follow a schema."""
        return any(tool.strict for tool in self.tools)

    def constraint(self, family: Family, document: Any = None) -> Constraint:
        """Return the constraint that the answer is a call in this format whose arguments follow the
        functions' schemas, or a document of a schema if one is given.

        Raises ApiError with the name of the function whose schema cannot be enforced.
        """
        opening, separator, closing = family.around
        callable_tools = [tool for tool in self.tools if not self.named or tool.name == self.choice]
        frames = tuple(family.frame(tool.name) for tool in callable_tools)
        syntax = tool_calls.Way(
            opening, frames, separator if self.parallel and not self.named else None, closing
        )
        return _constraint(
            [(tool.name, tool.parameters) for tool in callable_tools], [syntax], document
        )

    def amid(self, family: Family) -> Constraint:
        """Return the constraint for any text in which calls follow the functions' schemas from
        their opening mark on; arguments of functions that are not strict may be any JSON object.
        Raises ApiError as constraint() does.
        """
        opening, separator, closing = family.around
        frames_by_mark = [family.bound(tool.name) for tool in self.tools]
        # otherwise each call has its own mark
        has_separator = self.parallel and bool(opening or family.last)
        syntaxes = [
            tool_calls.Way(
                opening,
                tuple(frames[mark] for frames in frames_by_mark),
                separator if has_separator else None,
                closing,
                mark,
            )
            for mark in frames_by_mark[0]
        ]
        functions = [(tool.name, tool.parameters if tool.strict else OBJECT) for tool in self.tools]
        return _constraint(
            functions, syntaxes, amid=tool_calls.Amid(family.first, family.last, self.parallel)
        )


NO_TOOLS = Tools()


def _string_arguments(schema: Any) -> Iterator[str]:
    properties = schema.get("properties") if isinstance(schema, dict) else None
    for name, schema_of_property in properties.items() if isinstance(properties, dict) else ():
        if isinstance(schema_of_property, dict) and schema_of_property.get("type") == "string":
            yield name


def _constraint(
    functions: Sequence[tuple[str, Any]],
    ways: Sequence[tool_calls.Way],
    document: Any = None,
    amid: tool_calls.Amid | None = None,
) -> Constraint:
    try:
        return tool_calls.constraint(functions, ways, document, amid)
    except UserError as error:
        raise Problem(str(error), param="tools") from None


def tools(fields: Fields, nested: bool = True) -> Tools:
    """Read `tools`, `tool_choice` and `parallel_tool_calls` of a request. `is_nested`: functions
    are described in a field `function`, as in chat completions. Raises ApiError.
    """
    definitions = tuple(_read_tool(entry, nested) for entry in fields.tables("tools", MOST))
    names = [tool.name for tool in definitions]
    if len(set(names)) < len(names):
        duplicate = next(name for name in names if names.count(name) > 1)
        raise Problem(f"tools has two functions called {duplicate!r}", param="tools")
    choice, named = _read_choice(fields, nested)
    if named and choice not in names:
        raise Problem(
            f"tool_choice names the function {choice[:100]!r}, which is not in tools",
            param="tool_choice",
        )
    if choice == "required" and not named and not definitions:
        raise Problem("tool_choice is required, but there are no tools", param="tool_choice")
    if choice == "none" and not named:
        definitions = ()
    return Tools(definitions, choice, named, fields.flag("parallel_tool_calls", True))


def _read_tool(fields: Fields, nested: bool) -> Tool:
    kind_of_tool = fields.text("type", "function")
    if kind_of_tool != "function":
        raise Problem(
            f"{fields.path}: tools of type {str(kind_of_tool)[:40]} are not supported;"
            " use functions",
            param=fields.path,
        )
    function = fields
    if nested:
        inner = fields.table("function")
        if inner is None:
            raise Problem(f"{fields.at('function')} is missing", param=fields.at("function"))
        function = inner
    name = function.needed("name")
    if not (
        0 < len(name) <= LONGEST and all(letter.isalnum() or letter in "_.-" for letter in name)
    ):
        raise function.wrong("name", f"1 to {LONGEST} letters, digits, _, - or .")
    parameters = function.values.get("parameters")
    if parameters is not None and not isinstance(parameters, dict):
        raise Problem(
            f"{function.at('parameters')} must be a JSON schema, not {kind(parameters)}",
            param=function.at("parameters"),
        )
    shown = {
        "name": name,
        "description": function.text("description", ""),
        "parameters": parameters or ANYTHING,
    }
    strict = function.flag("strict")
    return Tool(name, parameters or ANYTHING, {"type": "function", "function": shown}, strict)


def _read_choice(fields: Fields, nested: bool) -> tuple[str, bool]:
    value = fields.values.get("tool_choice")
    if value is None:
        return "auto", False
    if isinstance(value, str):
        return fields.choice("tool_choice", WORDS, "auto"), False
    table = fields.table("tool_choice")
    assert table is not None
    if table.text("type") != "function":
        raise Problem(
            "tool_choice takes none, auto, required, or one function", param="tool_choice"
        )
    inner = table.table("function") if nested else table
    return (inner or table).needed("name"), True


def spelled(said: Sequence[Message], offered: Tools) -> list[Message]:
    """Return a conversation for a template without tools: definitions, calls and results as plain
    text.
    """
    messages = [_spell_out(message) for message in said]
    if not offered.tools:
        return messages
    prompt = TOLD.format(
        "\n".join(json.dumps(tool.shown, ensure_ascii=False) for tool in offered.tools)
    )
    if messages and messages[0].role == "system":
        return [Message("system", f"{messages[0].content}\n\n{prompt}"), *messages[1:]]
    return [Message("system", prompt), *messages]


def _spell_out(message: Message) -> Message:
    if message.role == "tool":
        return Message("user", f"<tool_response>\n{message.content}\n</tool_response>")
    functions = [function["function"] for function in message.more.get("tool_calls", ())]
    calls_ = [
        f"<tool_call>\n{json.dumps(function, ensure_ascii=False)}\n</tool_call>"
        for function in functions
    ]
    return Message(
        message.role, "\n".join([*([message.content] if message.content else []), *calls_])
    )
