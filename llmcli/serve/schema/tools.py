"""Functions that a model may call: OpenAI's definitions read, shown to the model, and forced where
that is asked.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from llmcli.errors import UserError
from llmcli.runtime.constraint import calls
from llmcli.runtime.constraint.base import Constraint
from llmcli.serve.calls.base import Family
from llmcli.serve.problems import Problem
from llmcli.serve.schema.fields import Fields, kind
from llmcli.types import Message

MOST, LONGEST = 128, 64
WORDS = "none", "auto", "required"
ANYTHING = {"type": "object", "properties": {}}
OBJECT = {"type": "object"}
# For models whose template knows of no tools: hermes's words, which most models have read.
TOLD = (
    "You may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n{}\n</tools>\n\n"
    "For each function call, return a JSON object with function name and arguments within <tool_call></tool_call> "
    'XML tags:\n<tool_call>\n{{"name": <function-name>, "arguments": <arguments-object>}}\n</tool_call>'
)


@dataclass(frozen=True, slots=True)
class Tool:
    """A function: its name, and what a template is shown of it. `strict`: its arguments must follow
    `parameters`.
    """

    name: str
    parameters: Any
    shown: dict[str, Any]
    strict: bool = False


@dataclass(frozen=True, slots=True)
class Tools:
    """What may be called. `choice` is none, auto, required, or the one function that must be called
    (`named`).
    """

    tools: tuple[Tool, ...] = ()
    choice: str = "auto"
    named: bool = False
    parallel: bool = True

    @property
    def names(self) -> frozenset[str]:
        """Of the functions."""
        return frozenset(tool.name for tool in self.tools)

    @property
    def texts(self) -> dict[str, frozenset[str]]:
        """The arguments of each function that are text by its schema."""
        return {tool.name: frozenset(_texts(tool.parameters)) for tool in self.tools}

    @property
    def forced(self) -> bool:
        """Whether the answer must be a call."""
        return bool(self.tools) and (self.named or self.choice == "required")

    @property
    def strict(self) -> bool:
        """Whether a call that the model makes of itself is held to a schema."""
        return any(tool.strict for tool in self.tools)

    def constraint(self, family: Family, document: Any = None) -> Constraint:
        """Calls as this family writes them, held to the functions' schemas; or a document of a
        schema.

        Raises Problem naming the function whose schema cannot be enforced.
        """
        begin, between, end = family.around
        wanted = [tool for tool in self.tools if not self.named or tool.name == self.choice]
        frames = tuple(family.frame(tool.name) for tool in wanted)
        way = calls.Way(begin, frames, between if self.parallel and not self.named else None, end)
        return _constraint([(tool.name, tool.parameters) for tool in wanted], [way], document)

    def amid(self, family: Family) -> Constraint:
        """Any text, in which calls are held to their schemas from the family's mark on; those of
        functions that are not strict to JSON objects. Raises Problem as above.
        """
        begin, between, end = family.around
        bound = [family.bound(tool.name) for tool in self.tools]
        several = self.parallel and bool(begin or family.last)  # else each has a mark of its own
        ways = [
            calls.Way(
                begin, tuple(one[mark] for one in bound), between if several else None, end, mark
            )
            for mark in bound[0]
        ]
        functions = [(tool.name, tool.parameters if tool.strict else OBJECT) for tool in self.tools]
        return _constraint(
            functions, ways, amid=calls.Amid(family.first, family.last, self.parallel)
        )


NO_TOOLS = Tools()


def _texts(schema: Any) -> Iterator[str]:
    known = schema.get("properties") if isinstance(schema, dict) else None
    for name, about in known.items() if isinstance(known, dict) else ():
        if isinstance(about, dict) and about.get("type") == "string":
            yield name


def _constraint(
    functions: Sequence[tuple[str, Any]],
    ways: Sequence[calls.Way],
    document: Any = None,
    amid: calls.Amid | None = None,
) -> Constraint:
    try:
        return calls.constraint(functions, ways, document, amid)
    except UserError as error:
        raise Problem(str(error), param="tools") from None


def tools(fields: Fields, nested: bool = True) -> Tools:
    """The `tools`, `tool_choice` and `parallel_tool_calls` of a request; `nested`: as chat
    completions have them, where a function is described within a field of its own.
    """
    found = tuple(_tool(one, nested) for one in fields.tables("tools", MOST))
    names = [tool.name for tool in found]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise Problem(f"tools has two functions called {twice!r}", param="tools")
    choice, named = _choice(fields, nested)
    if named and choice not in names:
        raise Problem(
            f"tool_choice names the function {choice[:100]!r}, which is not among tools",
            param="tool_choice",
        )
    if choice == "required" and not named and not found:
        raise Problem("tool_choice is required, and there are no tools", param="tool_choice")
    if choice == "none" and not named:
        found = ()
    return Tools(found, choice, named, fields.flag("parallel_tool_calls", True))


def _tool(fields: Fields, nested: bool) -> Tool:
    sort = fields.text("type", "function")
    if sort != "function":
        raise Problem(
            f"{fields.path}: this server has no tool of the type {str(sort)[:40]}; it takes functions",
            param=fields.path,
        )
    about = fields
    if nested:
        inner = fields.table("function")
        if inner is None:
            raise Problem(f"{fields.at('function')} is missing", param=fields.at("function"))
        about = inner
    name = about.needed("name")
    if not (
        0 < len(name) <= LONGEST and all(letter.isalnum() or letter in "_.-" for letter in name)
    ):
        raise about.wrong("name", f"1 to {LONGEST} letters, digits, _, - or .")
    parameters = about.values.get("parameters")
    if parameters is not None and not isinstance(parameters, dict):
        raise Problem(
            f"{about.at('parameters')} must be a JSON schema, not {kind(parameters)}",
            param=about.at("parameters"),
        )
    shown = {
        "name": name,
        "description": about.text("description", ""),
        "parameters": parameters or ANYTHING,
    }
    strict = about.flag("strict")
    return Tool(name, parameters or ANYTHING, {"type": "function", "function": shown}, strict)


def _choice(fields: Fields, nested: bool) -> tuple[str, bool]:
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
    """A conversation for a template that knows of no tools: the functions, calls and results as
    plain text.
    """
    out = [_spelled(message) for message in said]
    if not offered.tools:
        return out
    words = TOLD.format(
        "\n".join(json.dumps(tool.shown, ensure_ascii=False) for tool in offered.tools)
    )
    if out and out[0].role == "system":
        return [Message("system", f"{out[0].content}\n\n{words}"), *out[1:]]
    return [Message("system", words), *out]


def _spelled(message: Message) -> Message:
    if message.role == "tool":
        return Message("user", f"<tool_response>\n{message.content}\n</tool_response>")
    made = [one["function"] for one in message.more.get("tool_calls", ())]
    words = [f"<tool_call>\n{json.dumps(one, ensure_ascii=False)}\n</tool_call>" for one in made]
    return Message(
        message.role, "\n".join([*([message.content] if message.content else []), *words])
    )
