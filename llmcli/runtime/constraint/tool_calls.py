"""Grammars for function calls: the answer consists of calls only, or is a text that may contain
calls.

A call is fixed text around arguments, which follow a JSON schema. The fixed text depends on the
model family. Where calls are optional, a call starts at a mark: text before the mark is free, text
after it follows the schemas (like llama.cpp's lazy grammars with triggers). One grammar covers the
whole answer, so a mark may end inside a token.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from llmcli.errors import UserError
from llmcli.runtime.constraint.base import Constraint
from llmcli.runtime.constraint.schema_check import CheckedSchema, check_schema
from llmcli.runtime.constraint.schema_cost import NO_COST

MAX_CALLS = 16  # maximum calls per answer; without a limit small models would not stop
ANY_TEXT, BLANK_TEXT = r"(.|\n)*", r"[ \t\r\n]*"


@dataclass(frozen=True, slots=True)
class CallSyntax:
    """How calls are written. `begin`: the text before all calls. `frames`: for each function, the
    text before and after its arguments. `between`: the text between two calls; None allows only one
    call. `end`: the text after all calls. `mark`: the text that starts an optional call; "" if
    calls are required.
    """

    begin: str
    frames: tuple[tuple[str, str], ...]
    between: str | None
    end: str
    mark: str = ""


@dataclass(frozen=True, slots=True)
class InterleavedCalls:
    """Where a text may contain calls. `first`: only at its start. `last`: calls end the answer.
    `several`: text and more calls may follow a call.
    """

    first: bool
    last: bool
    several: bool


@dataclass(frozen=True, slots=True)
class ToolCallGrammar:
    """The contents of a constraint for calls. `arguments`: the schema of each function's arguments.
    `syntaxes`: the ways in which calls may be written. `document`: a schema for an answer without
    calls, or None. `interleaved`: where a text may contain calls; None if the answer must not
    contain other text.
    """

    arguments: tuple[CheckedSchema, ...]
    syntaxes: tuple[CallSyntax, ...]
    document: CheckedSchema | None
    interleaved: InterleavedCalls | None


def tool_call_constraint(
    functions: Sequence[tuple[str, Any]],
    syntaxes: Sequence[CallSyntax],
    document: Any = None,
    interleaved: InterleavedCalls | None = None,
) -> Constraint:
    """Return a constraint for calls. `functions`: the name and the argument schema of each
    function. `document`: the schema of a JSON document that is allowed instead of calls.
    `interleaved`: given if the answer is a text that may contain calls.

    Raises UserError that names the function whose schema cannot be enforced.
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
        "ways": [asdict(way) for way in syntaxes],
        "document": document,
        "amid": interleaved and asdict(interleaved),
    }
    return Constraint("calls", json.dumps(document_json, ensure_ascii=False))


def read_tool_calls(text: str) -> ToolCallGrammar:
    """Read the text of a constraint that `tool_call_constraint` returned."""
    fields = json.loads(text)
    ways = tuple(
        CallSyntax(**{**entry, "frames": tuple(map(tuple, entry["frames"]))})
        for entry in fields["ways"]
    )
    document = None if fields["document"] is None else check_schema(json.dumps(fields["document"]))
    arguments = tuple(check_schema(json.dumps(schema)) for schema in fields["arguments"])
    return ToolCallGrammar(
        arguments, ways, document, InterleavedCalls(**fields["amid"]) if fields["amid"] else None
    )


def to_lark(wanted: ToolCallGrammar, layout: dict[str, Any]) -> str:
    """Return the grammar in llguidance's dialect of Lark. `layout`: the white space of JSON."""
    rules = [_rule("start", _start(wanted))]
    for number, schema in enumerate(wanted.arguments):
        rules.append(f"arguments{number}: {_json(schema, layout)}")
    if wanted.document:
        rules.append(f"document: {_json(wanted.document, layout)}")
    if wanted.interleaved:
        rules += _text(wanted.syntaxes, wanted.interleaved)
    for number, way in enumerate(wanted.syntaxes):
        rules += _way(f"{number}", way)
    return "\n".join(rules)


def _start(wanted: ToolCallGrammar) -> str:
    every = " | ".join(f"calls{number}" for number in range(len(wanted.syntaxes)))
    if wanted.interleaved is None:
        return f"{every} | document" if wanted.document else every
    if wanted.interleaved.last:
        return f"{every} | text"
    return f"({every}){{0,{MAX_CALLS if wanted.interleaved.several else 1}}} text"


def _text(ways: Sequence[CallSyntax], amid: InterleavedCalls) -> list[str]:
    """Return the rules for text without a mark, and for text that ends with a mark. The second kind
    of rule is lazy, so it ends as soon as possible, which is at the mark.
    """
    before = BLANK_TEXT if amid.first else ANY_TEXT
    marks = "|".join(_literally(way.mark) for way in ways)
    leads = [
        f"lead{number}[lazy]: /{before}{_literally(way.mark)}/" for number, way in enumerate(ways)
    ]
    return ["text: TEXT", f"TEXT: /{ANY_TEXT}/ & ~/{before}({marks}){ANY_TEXT}/", *leads]


def _way(number: str, way: CallSyntax) -> list[str]:
    """Return the rules for calls in one syntax. If the syntax has a mark, the text before the first
    call already includes it, so the rule of the first call continues after the mark.
    """
    lead = f"lead{number}" if way.mark else ""
    again = (
        "" if way.between is None else f"({_quoted(way.between)} call{number}){{0,{MAX_CALLS - 1}}}"
    )
    first = [((way.begin + before).removeprefix(way.mark), after) for before, after in way.frames]
    rules = [
        _rule(f"calls{number}", lead, f"first{number}", again, _quoted(way.end)),
        _choice(f"first{number}", first),
    ]
    return rules if way.between is None else [*rules, _choice(f"call{number}", way.frames)]


def _choice(name: str, frames: Sequence[tuple[str, str]]) -> str:
    calls = (
        f"{_quoted(before)} arguments{at} {_quoted(after)}"
        for at, (before, after) in enumerate(frames)
    )
    return _rule(name, " | ".join(calls))


def _rule(name: str, *parts: str) -> str:
    return f"{name}: {' '.join(part for part in parts if part)}"


def _json(schema: CheckedSchema, layout: dict[str, Any]) -> str:
    return "%json " + json.dumps({**json.loads(schema.text), **layout}, ensure_ascii=False)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""


def _literally(text: str) -> str:
    """Return a regular expression that matches only this text."""
    return "".join(rf"\x{{{ord(letter):X}}}" for letter in text)
