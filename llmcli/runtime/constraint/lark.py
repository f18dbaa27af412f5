"""Translate constraints that are grammars or regular expressions to llguidance's dialect of Lark."""

from llmcli.errors import UserError
from llmcli.runtime.constraint import gbnf
from llmcli.runtime.constraint.base import Constraint

MAX_CHARACTERS = 1 << 18  # of a grammar in Lark or a regular expression


def to_lark(constraint: Constraint) -> str:
    """Return the grammar of a constraint of the kind "gbnf", "lark" or "regex". Raises UserError if
    it is too long, or if GBNF is invalid.
    """
    text = constraint.text
    if constraint.kind == "gbnf":
        return gbnf.to_lark(text)
    if len(text) > MAX_CHARACTERS:
        raise UserError(
            f"the {constraint.kind} has {len(text)} characters; the limit is {MAX_CHARACTERS}",
            hint="use a smaller one",
        )
    if constraint.kind == "lark":
        return text
    assert constraint.kind == "regex", constraint.kind
    return f"start: /{_regex_body(text)}/\n"


def _regex_body(pattern: str) -> str:
    """Return a regular expression as it is written between slashes. The whole answer must match it,
    so anchors at its ends are left out.
    """
    pattern = pattern.removeprefix("^")
    start = pattern.removesuffix("$")
    if (len(start) - len(start.rstrip("\\"))) % 2 == 0:  # the dollar sign is not escaped
        pattern = start
    body, is_escaped = [], False
    for letter in pattern:
        if letter == "/" and not is_escaped:
            body.append("\\/")
        elif letter == "\n":
            body.append("n" if is_escaped else "\\n")
        else:
            body.append(letter)
        is_escaped = letter == "\\" and not is_escaped
    return "".join(body)
