"""The flags that say what an answer must be: a grammar or a JSON schema, from the line or from a
file.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from llmcli.errors import UsageError, UserError

if TYPE_CHECKING:
    from llmcli.runtime.constraint.base import Constraint

# Where the text stands: flag -> (its spelling, kind of constraint, whether it names a file).
SOURCES: dict[str, tuple[str, Literal["gbnf", "json_schema"], bool]] = {
    "grammar": ("--grammar", "gbnf", False),
    "grammar_file": ("--grammar-file", "gbnf", True),
    "json_schema": ("-j", "json_schema", False),
    "json_schema_file": ("-jf", "json_schema", True),
}
WAYS = {"grammar_engine": "--grammar-engine", "jump": "--jump"}


def constraint(typed: dict[str, Any]) -> "Constraint | None":
    """Take the flags of this module out of `typed`; raises UserError where they contradict one
    another.
    """
    from llmcli.commands.flags import proper, text_file
    from llmcli.runtime.constraint import gbnf, schema
    from llmcli.runtime.constraint.base import ENGINES, JUMPS, Constraint

    given = {name: typed.pop(name) for name in SOURCES if name in typed}
    ways = {name: typed.pop(name) for name in WAYS if name in typed}
    for name, known in (("grammar_engine", ENGINES), ("jump", JUMPS)):
        if ways.get(name, known[0]) not in known:
            raise UserError(
                f"{WAYS[name]} is {ways[name]!r}",
                hint=f"{WAYS[name]} takes one of: {', '.join(known)}",
            )
    if len(given) > 1:
        words = " and ".join(SOURCES[name][0] for name in given)
        raise UsageError(f"{words} both say what the answer must be", hint="give one of them")
    if not given:
        if ways:
            raise UsageError(
                f"{WAYS[next(iter(ways))]} is about a grammar or schema", hint="give one: -j SCHEMA"
            )
        return None
    ((name, text),) = given.items()
    spelling, kind, file = SOURCES[name]
    proper(spelling, text)
    if file:
        text = text_file(Path(text).expanduser())
    if kind == "json_schema" and ways.get("grammar_engine") == "llama":
        raise UsageError(
            "llama.cpp's engine takes GBNF, no JSON schemas",
            hint="leave out --grammar-engine llama",
        )
    if typed.get("ignore_eos"):
        raise UsageError(
            f"{spelling} says where the answer ends, --ignore-eos that it goes on",
            hint="give only one",
        )
    if kind == "json_schema":  # before a model is loaded
        schema.checked(text)
    elif ways.get("grammar_engine") == "llama":
        gbnf.check(text)
    else:
        gbnf.to_lark(text)
    return Constraint(
        kind, text, **{"engine" if way == "grammar_engine" else way: ways[way] for way in ways}
    )
