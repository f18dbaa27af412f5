"""Grammars for function calls (tool calls). The answer consists of calls only, or is a text that
may contain calls.

A call is fixed text around the arguments, which are a JSON value that fits the function's schema.
The fixed text depends on the model family. Where calls are optional, each call starts with a mark,
such as <tool_call>. The text before the mark is free; the text after it must follow the grammar
(like llama.cpp's lazy grammars with triggers). A single grammar covers free text and calls, so a
mark may also end inside a token.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from llmcli.errors import UserError
from llmcli.runtime.constraint.base import Constraint
from llmcli.runtime.constraint.schema_check import CheckedSchema, check_schema
from llmcli.runtime.constraint.schema_cost import NO_COST

# maximum number of calls in an answer; without a limit, small models repeat calls without end
MAX_CALLS = 16
ANY_TEXT, BLANK_TEXT = r"(.|\n)*", r"[ \t\r\n]*"


@dataclass(frozen=True, slots=True)
class CallSyntax:
    """The fixed text of calls in the format of a model family: `begin`, then calls with `between`
    between them, then `end`.
    """

    begin: str  # text before the first call
    frames: tuple[tuple[str, str], ...]  # for each function, the text before and after arguments
    between: str | None  # text between two calls; None allows only one call
    end: str  # text after the last call
    # The text that marks the start of optional calls: a prefix of `begin` and the text of a frame.
    # It is empty if calls are required.
    mark: str = ""


@dataclass(frozen=True, slots=True)
class InterleavedCalls:
    """Where an answer that is a text may contain calls."""

    first: bool  # only at the start of the text, after white space
    last: bool  # the answer ends after the calls
    several: bool  # text and further calls may follow; of no effect if `last`


@dataclass(frozen=True, slots=True)
class ToolCallGrammar:
    """The contents of a constraint of kind "calls"."""

    arguments: tuple[CheckedSchema, ...]  # the schema of each function's arguments
    syntaxes: tuple[CallSyntax, ...]  # the alternative ways to write calls
    # The schema of a JSON document that the model may answer instead of calls; None if calls are
    # required.
    document: CheckedSchema | None
    interleaved: InterleavedCalls | None  # None if the answer must contain no text besides calls


def tool_call_constraint(
    functions: Sequence[tuple[str, Any]],
    syntaxes: Sequence[CallSyntax],
    document: Any = None,
    interleaved: InterleavedCalls | None = None,
) -> Constraint:
    """Return the constraint for an answer with function calls.

    `functions`: the name of each function and the JSON schema of its arguments. `syntaxes`: the
    alternative ways to write calls. `document`: the JSON schema of a document that the model may
    answer instead of calls. `interleaved`: where the answer may contain calls, if it is a text.

    Raises UserError, with the name of the function, when a schema cannot be enforced.
    """
    cost = NO_COST if document is None else check_schema(json.dumps(document)).cost
    for name, schema in functions:
        try:
            cost += check_schema(json.dumps(schema)).cost
            cost.check()
        except UserError as error:
            raise UserError(f"function {name}: {error}", hint=error.hint) from None
    document_json = {
        "arguments": [schema for _, schema in functions],
        "ways": [asdict(syntax) for syntax in syntaxes],
        "document": document,
        "amid": interleaved and asdict(interleaved),
    }
    return Constraint("calls", json.dumps(document_json, ensure_ascii=False))


def read_tool_calls(text: str) -> ToolCallGrammar:
    """Parse the `text` of a constraint that `tool_call_constraint` returned."""
    fields = json.loads(text)
    syntaxes = tuple(
        CallSyntax(**{**entry, "frames": tuple(map(tuple, entry["frames"]))})
        for entry in fields["ways"]
    )
    document = None if fields["document"] is None else check_schema(json.dumps(fields["document"]))
    arguments = tuple(check_schema(json.dumps(schema)) for schema in fields["arguments"])
    return ToolCallGrammar(
        arguments,
        syntaxes,
        document,
        InterleavedCalls(**fields["amid"]) if fields["amid"] else None,
    )


def to_lark(grammar: ToolCallGrammar, layout: dict[str, Any]) -> str:
    """Return the grammar in llguidance's dialect of Lark.

    `layout`: the key "x-guidance" with llguidance's options for white space in JSON.
    """
    rules = [_rule("start", _start_rule(grammar))]
    for number, schema in enumerate(grammar.arguments):
        rules.append(f"arguments{number}: {_json_rule(schema, layout)}")
    if grammar.document:
        rules.append(f"document: {_json_rule(grammar.document, layout)}")
    if grammar.interleaved:
        rules += _text_rules(grammar.syntaxes, grammar.interleaved)
    for number, syntax in enumerate(grammar.syntaxes):
        rules += _syntax_rules(f"{number}", syntax)
    return "\n".join(rules)


def _start_rule(grammar: ToolCallGrammar) -> str:
    """Return the body of the rule of the whole answer."""
    calls = " | ".join(f"calls{number}" for number in range(len(grammar.syntaxes)))
    if grammar.interleaved is None:
        return f"{calls} | document" if grammar.document else calls
    if grammar.interleaved.last:
        return f"{calls} | text"
    return f"({calls}){{0,{MAX_CALLS if grammar.interleaved.several else 1}}} text"


def _text_rules(syntaxes: Sequence[CallSyntax], interleaved: InterleavedCalls) -> list[str]:
    """Return the rule `text`, for text without a mark, and for each syntax the rule `leadN`, for
    text that ends with the mark of the syntax. The rules `leadN` are lazy: they end at the first
    mark.
    """
    before = BLANK_TEXT if interleaved.first else ANY_TEXT
    marks = "|".join(_exact_pattern(syntax.mark) for syntax in syntaxes)
    leads = [
        f"lead{number}[lazy]: /{before}{_exact_pattern(syntax.mark)}/"
        for number, syntax in enumerate(syntaxes)
    ]
    return ["text: TEXT", f"TEXT: /{ANY_TEXT}/ & ~/{before}({marks}){ANY_TEXT}/", *leads]


def _syntax_rules(number: str, syntax: CallSyntax) -> list[str]:
    """Return the rules for calls in one syntax: `callsN` for all calls, `firstN` for the first call
    and `callN` for each further call. The text before the first call (`leadN`) already includes the
    mark, if there is one, so `firstN` starts after the mark.
    """
    lead = f"lead{number}" if syntax.mark else ""
    more_calls = (
        ""
        if syntax.between is None
        else f"({_quoted(syntax.between)} call{number}){{0,{MAX_CALLS - 1}}}"
    )
    first = [
        ((syntax.begin + before).removeprefix(syntax.mark), after)
        for before, after in syntax.frames
    ]
    rules = [
        _rule(f"calls{number}", lead, f"first{number}", more_calls, _quoted(syntax.end)),
        _call_rule(f"first{number}", first),
    ]
    return rules if syntax.between is None else [*rules, _call_rule(f"call{number}", syntax.frames)]


def _call_rule(name: str, frames: Sequence[tuple[str, str]]) -> str:
    """Return the rule `name` for a call of any function. `frames`: for each function, the text
    before and after its arguments.
    """
    calls = (
        f"{_quoted(before)} arguments{number} {_quoted(after)}"
        for number, (before, after) in enumerate(frames)
    )
    return _rule(name, " | ".join(calls))


def _rule(name: str, *symbols: str) -> str:
    """Return a Lark rule whose body is the sequence of `symbols`. Empty ones are left out."""
    return f"{name}: {' '.join(symbol for symbol in symbols if symbol)}"


def _json_rule(schema: CheckedSchema, layout: dict[str, Any]) -> str:
    """Return the body of a rule for a JSON value that fits `schema` (llguidance's %json)."""
    return "%json " + json.dumps({**json.loads(schema.text), **layout}, ensure_ascii=False)


def _quoted(text: str) -> str:
    """Return a Lark literal of the text; an empty string for no text."""
    return json.dumps(text, ensure_ascii=False) if text else ""


def _exact_pattern(text: str) -> str:
    """Return a regular expression that matches exactly `text`."""
    return "".join(rf"\x{{{ord(letter):X}}}" for letter in text)
