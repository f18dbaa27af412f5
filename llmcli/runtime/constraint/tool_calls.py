"""Grammars for function calls (tool calls). The answer consists of calls only, or is a text that
may contain calls.

A call is fixed text around the arguments, which are a JSON value that fits the function's schema.
The fixed text depends on the model family. Where calls are optional, each call starts with a mark,
such as <tool_call>. The text before the mark is free; the text after it must follow the grammar
(like llama.cpp's lazy grammars with triggers). A single grammar covers free text and calls, so a
mark may also end inside a token.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from llmcli.errors import UserError
from llmcli.runtime.constraint.base import Constraint
from llmcli.runtime.constraint.json_schema.check import CheckedSchema, check_schema
from llmcli.runtime.constraint.json_schema.cost import NO_COST, SchemaCost

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
class AnswerSchema:
    """The JSON schema of an answer, or with a `name` that of a function's arguments.

    `is_strict`: the schema is refused if something in it cannot be enforced. Otherwise it is
    followed as far as possible.
    """

    schema: Any
    is_strict: bool = False
    name: str = ""

    @property
    def constraint(self) -> Constraint:
        """The constraint for an answer that is a document of this schema."""
        return Constraint("json_schema", json.dumps(self.schema), is_strict=self.is_strict)

    def check(
        self, cost: SchemaCost, check: Callable[[str, bool], CheckedSchema] = check_schema
    ) -> CheckedSchema:
        """Return the checked schema. One that is not strict and cannot be checked is replaced by
        the schema of any object.

        `cost`: of the schemas before this one. Raises UserError, with the name of the function.
        """
        try:
            checked = check(json.dumps(self.schema), self.is_strict)
            (cost + checked.cost).check()
        except UserError as error:
            if not self.name:
                raise
            if self.is_strict:
                raise UserError(f"function {self.name}: {error}", hint=error.hint) from None
            checked = check_schema('{"type": "object"}')
            return replace(checked, not_enforced=(f"function {self.name}: {error}",))
        if not self.name:
            return checked
        notes = tuple(f"function {self.name}: {note}" for note in checked.not_enforced)
        return replace(checked, not_enforced=notes)


@dataclass(frozen=True, slots=True)
class ToolCallGrammar:
    """The contents of a constraint of kind "calls".

    - `functions`: the functions, and last the document if there is one.
    - `schemas`: their checked schemas.
    - `syntaxes`: the alternative ways to write calls.
    - `interleaved`: None if the answer must contain no text besides calls.
    """

    functions: tuple[AnswerSchema, ...]
    schemas: tuple[CheckedSchema, ...]
    syntaxes: tuple[CallSyntax, ...]
    interleaved: InterleavedCalls | None

    @property
    def arguments(self) -> tuple[CheckedSchema, ...]:
        """The schemas of the functions' arguments."""
        return self.schemas[:-1] if self.document else self.schemas

    @property
    def document(self) -> CheckedSchema | None:
        """The schema of a JSON document that the model may answer instead of calls; None if calls
        are required.
        """
        return self.schemas[-1] if self.functions and not self.functions[-1].name else None

    @property
    def not_enforced(self) -> tuple[str, ...]:
        """What the schemas demand and the grammar does not enforce."""
        return tuple(note for schema in self.schemas for note in schema.not_enforced)

    def refit(self, check: Callable[[str, bool], CheckedSchema]) -> "ToolCallGrammar":
        """Return the grammar with all schemas checked anew by `check`."""
        return replace(self, schemas=_check_functions(self.functions, check))


def tool_call_constraint(
    functions: Sequence[AnswerSchema],
    syntaxes: Sequence[CallSyntax],
    document: AnswerSchema | None = None,
    interleaved: InterleavedCalls | None = None,
) -> Constraint:
    """Return the constraint for an answer with function calls.

    `syntaxes`: the alternative ways to write calls. `document`: the JSON schema of a document that
    the model may answer instead of calls. `interleaved`: where the answer may contain calls, if it
    is a text.

    Raises UserError, with the name of the function, when a schema cannot be enforced.
    """
    all_functions = (*functions, document) if document else tuple(functions)
    _check_functions(all_functions, check_schema)
    document_json = {
        "functions": [asdict(function) for function in all_functions],
        "ways": [asdict(syntax) for syntax in syntaxes],
        "amid": interleaved and asdict(interleaved),
    }
    return Constraint("calls", json.dumps(document_json, ensure_ascii=False))


def read_tool_calls(text: str) -> ToolCallGrammar:
    """Parse the `text` of a constraint that `tool_call_constraint` returned."""
    fields = json.loads(text)
    functions = tuple(AnswerSchema(**entry) for entry in fields["functions"])
    syntaxes = tuple(
        CallSyntax(**{**entry, "frames": tuple(map(tuple, entry["frames"]))})
        for entry in fields["ways"]
    )
    interleaved = InterleavedCalls(**fields["amid"]) if fields["amid"] else None
    schemas = _check_functions(functions, check_schema)
    return ToolCallGrammar(functions, schemas, syntaxes, interleaved)


def _check_functions(
    functions: Sequence[AnswerSchema], check: Callable[[str, bool], CheckedSchema]
) -> tuple[CheckedSchema, ...]:
    """Return the checked schemas of functions, whose costs are added up."""
    cost, checked = NO_COST, list[CheckedSchema]()
    for function in functions:
        checked.append(function.check(cost, check))
        cost += checked[-1].cost
    return tuple(checked)


def to_lark(grammar: ToolCallGrammar, layout: dict[str, Any]) -> str:
    """Return the grammar in llguidance's dialect of Lark.

    `layout`: the key "x-guidance" with llguidance's options for white space in JSON.
    """
    rules = [_rule("start", _start_rule(grammar))]
    for number, schema in enumerate(grammar.arguments):
        rules.append(f"arguments{number}: {json_rule(schema.text, layout)}")
    if grammar.document:
        rules.append(f"document: {json_rule(grammar.document.text, layout)}")
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


def json_rule(schema: str, layout: dict[str, Any]) -> str:
    """Return the body of a rule for a JSON value that fits the schema (llguidance's %json).

    `schema`: the text of an object. `layout`: the key "x-guidance" with llguidance's options for
    white space in JSON.
    """
    return "%json " + json.dumps({**json.loads(schema), **layout}, ensure_ascii=False)


def _quoted(text: str) -> str:
    """Return a Lark literal of the text; an empty string for no text."""
    return json.dumps(text, ensure_ascii=False) if text else ""


def _exact_pattern(text: str) -> str:
    """Return a regular expression that matches exactly `text`."""
    return "".join(rf"\x{{{ord(letter):X}}}" for letter in text)
