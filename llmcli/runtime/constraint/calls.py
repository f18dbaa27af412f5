"""Grammars for function calls: an answer must consist of calls, or may make some amid its text.

A call is fixed text around arguments that follow a JSON schema. The fixed text is the model
family's way to write a call; here it is only text. A call that may be made begins at a mark: the
text before the mark is free, the text behind it is bound by the schemas (as with llama.cpp's lazy
grammars and their triggers). One grammar covers the whole answer, so that a mark may end in the
middle of a token.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from llmcli.errors import UserError
from llmcli.runtime.constraint.base import Constraint
from llmcli.runtime.constraint.schema import Checked, checked
from llmcli.runtime.constraint.size import NOTHING

MOST = 16  # calls of one answer: small models know no end
ANY, BLANK = r"(.|\n)*", r"[ \t\r\n]*"


@dataclass(frozen=True, slots=True)
class Way:
    """One way to write calls: the text before all of them, between two (None: only one is made) and
    behind all; `frames`: for each function the text before and behind its arguments. `mark`: what
    begins a call that may be made; "" where one must be.
    """

    begin: str
    frames: tuple[tuple[str, str], ...]
    between: str | None
    end: str
    mark: str = ""


@dataclass(frozen=True, slots=True)
class Amid:
    """Where calls may stand in a text. `first`: only at its beginning; `last`: they end it;
    `several`: text and more calls may follow them.
    """

    first: bool
    last: bool
    several: bool


@dataclass(frozen=True, slots=True)
class Calls:
    """Calls in some ways, of functions with these arguments; or else a `document`, where there is
    one.
    """

    arguments: tuple[Checked, ...]
    ways: tuple[Way, ...]
    document: Checked | None
    amid: Amid | None


def constraint(
    functions: Sequence[tuple[str, Any]],
    ways: Sequence[Way],
    document: Any = None,
    amid: Amid | None = None,
) -> Constraint:
    """`functions` are names and schemas of arguments. With `amid` the answer is a text that calls
    may stand in.

    Raises UserError naming the function whose schema cannot be enforced.
    """
    whole = NOTHING if document is None else checked(json.dumps(document)).size
    for name, schema in functions:
        try:
            whole += checked(json.dumps(schema)).size
            whole.check()
        except UserError as error:
            raise UserError(f"function {name}: {error}", hint=error.hint) from None
    told = {
        "arguments": [schema for _, schema in functions],
        "ways": [asdict(way) for way in ways],
        "document": document,
        "amid": amid and asdict(amid),
    }
    return Constraint("calls", json.dumps(told, ensure_ascii=False))


def read(text: str) -> Calls:
    """What `constraint` wrote."""
    told = json.loads(text)
    ways = tuple(Way(**{**one, "frames": tuple(map(tuple, one["frames"]))}) for one in told["ways"])
    document = None if told["document"] is None else checked(json.dumps(told["document"]))
    arguments = tuple(checked(json.dumps(schema)) for schema in told["arguments"])
    return Calls(arguments, ways, document, Amid(**told["amid"]) if told["amid"] else None)


def to_lark(wanted: Calls, layout: dict[str, Any]) -> str:
    """llguidance's dialect of Lark; `layout` says how its JSON is spaced."""
    rules = [_rule("start", _start(wanted))]
    for number, schema in enumerate(wanted.arguments):
        rules.append(f"arguments{number}: {_json(schema, layout)}")
    if wanted.document:
        rules.append(f"document: {_json(wanted.document, layout)}")
    if wanted.amid:
        rules += _text(wanted.ways, wanted.amid)
    for number, way in enumerate(wanted.ways):
        rules += _way(f"{number}", way)
    return "\n".join(rules)


def _start(wanted: Calls) -> str:
    every = " | ".join(f"calls{number}" for number in range(len(wanted.ways)))
    if wanted.amid is None:
        return f"{every} | document" if wanted.document else every
    if wanted.amid.last:
        return f"{every} | text"
    return f"({every}){{0,{MOST if wanted.amid.several else 1}}} text"


def _text(ways: Sequence[Way], amid: Amid) -> list[str]:
    """The rules of text without a mark, and of text up to one. A lazy rule ends as soon as it can:
    at the mark.
    """
    before = BLANK if amid.first else ANY
    marks = "|".join(_literally(way.mark) for way in ways)
    leads = [
        f"lead{number}[lazy]: /{before}{_literally(way.mark)}/" for number, way in enumerate(ways)
    ]
    return ["text: TEXT", f"TEXT: /{ANY}/ & ~/{before}({marks}){ANY}/", *leads]


def _way(number: str, way: Way) -> list[str]:
    """The rules of calls in one way. Where text leads up to a mark, the first call goes on behind
    the mark.
    """
    lead = f"lead{number}" if way.mark else ""
    again = "" if way.between is None else f"({_quoted(way.between)} call{number}){{0,{MOST - 1}}}"
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


def _json(schema: Checked, layout: dict[str, Any]) -> str:
    return "%json " + json.dumps({**json.loads(schema.text), **layout}, ensure_ascii=False)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""


def _literally(text: str) -> str:
    """A regular expression of this text alone."""
    return "".join(rf"\x{{{ord(letter):X}}}" for letter in text)
