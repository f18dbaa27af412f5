"""Function calls that an answer must consist of: texts around arguments of a JSON schema, as a grammar.

What stands around them is the model family's way to write a call; here it is only text.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from llmcli.errors import UserError
from llmcli.runtime.constraint.base import Constraint
from llmcli.runtime.constraint.schema import Checked, checked

MOST = 16  # calls of one answer: small models know no end


@dataclass(frozen=True, slots=True)
class Call:
    """One function's way to be called: text, arguments, text."""

    before: str
    arguments: Checked
    after: str


@dataclass(frozen=True, slots=True)
class Calls:
    """One call, or several with `between` between them (None: only one); or else a `document`, where there is one."""

    begin: str
    calls: tuple[Call, ...]
    between: str | None
    end: str
    document: Checked | None


def constraint(
    begin: str, calls: Sequence[tuple[str, str, Any, str]], between: str | None, end: str, document: Any = None
) -> Constraint:
    """`calls` are a function's name, the text before its arguments, their schema, and the text after them.

    Raises UserError naming the function whose schema cannot be enforced.
    """
    for name, _, schema, _ in calls:
        try:
            checked(json.dumps(schema))
        except UserError as error:
            raise UserError(f"function {name}: {error}", hint=error.hint) from None
    told = {"begin": begin, "calls": [rest for _, *rest in calls], "between": between, "end": end}
    return Constraint("calls", json.dumps({**told, "document": document}, ensure_ascii=False))


def read(text: str) -> Calls:
    """What `constraint` wrote."""
    told = json.loads(text)
    calls = tuple(Call(before, checked(json.dumps(schema)), after) for before, schema, after in told["calls"])
    document = None if told["document"] is None else checked(json.dumps(told["document"]))
    return Calls(told["begin"], calls, told["between"], told["end"], document)


def to_lark(wanted: Calls, layout: dict[str, Any]) -> str:
    """llguidance's dialect of Lark; `layout` says how its JSON is spaced."""
    again = "" if wanted.between is None else f"({_quoted(wanted.between)} call){{0,{MOST - 1}}}"
    rules = [
        "start: calls | document" if wanted.document else "start: calls",
        _rule("calls", _quoted(wanted.begin), "call", again, _quoted(wanted.end)),
        "call: " + " | ".join(f"call{number}" for number in range(len(wanted.calls))),
    ]
    for number, call in enumerate(wanted.calls):
        rules.append(_rule(f"call{number}", _quoted(call.before), f"arguments{number}", _quoted(call.after)))
        rules.append(f"arguments{number}: {_json(call.arguments, layout)}")
    if wanted.document:
        rules.append(f"document: {_json(wanted.document, layout)}")
    return "\n".join(rules)


def _rule(name: str, *parts: str) -> str:
    return f"{name}: {' '.join(part for part in parts if part)}"


def _json(schema: Checked, layout: dict[str, Any]) -> str:
    return "%json " + json.dumps({**json.loads(schema.text), **layout}, ensure_ascii=False)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""
