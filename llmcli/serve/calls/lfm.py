"""`<|tool_call_start|>[name(key="text", other=3)]<|tool_call_end|>`: LFM2, in Python's words.

A forced call is written as JSON, which these models write where they are told to. Python is told whole: whether it is
a list of calls at all, and how far a text goes that others may be joined to, is known at its end.
"""

import ast
import json
import re
from typing import Any, ClassVar

from llmcli.serve.calls.base import Call, Family, Taken, calls, keyed, made, within

OPENS, CLOSES = "<|tool_call_start|>", "<|tool_call_end|>"
NAME = re.compile(r"[\w.]+")
WORDS = {"true": True, "false": False, "null": None}  # JSON's, which stand among Python's


class Lfm(Family):
    """One list of calls."""

    name: ClassVar[str] = "lfm"
    order: ClassVar[int] = 1
    marks: ClassVar[tuple[str, ...]] = (OPENS, "List of tools: <|tool_list_start|>", "List of tools: [")
    opens: ClassVar[tuple[str, ...]] = (OPENS,)
    closes: ClassVar[tuple[str, ...]] = (CLOSES,)
    begins: ClassVar[str] = keyed(r"<\|tool_call_start\|>\s*\[?\s*")
    goes_on: ClassVar[str] = keyed(r"\s*\}\s*,\s*")

    def take(self, text: str, over: bool) -> Taken | None:
        inner = within(text, OPENS, CLOSES, over)
        if inner is None:
            return None
        try:
            return Taken(calls(json.loads(inner[0])), inner[1])
        except ValueError:
            return Taken(pythonic(inner[0]), inner[1])

    def frame(self, name: str) -> tuple[str, str]:
        return f'{{"name": {json.dumps(name)}, "arguments": ', "}"

    @property
    def around(self) -> tuple[str, str | None, str]:
        return OPENS + "[", ", ", "]" + CLOSES


def pythonic(text: str) -> tuple[Call, ...]:
    """The calls of a list of them as Python has it, read and never run; raises ValueError for anything else."""
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, MemoryError) as error:
        raise ValueError(text) from error
    found = tree.elts if isinstance(tree, ast.List) else [tree]
    if not found:
        raise ValueError(text)
    return tuple(_call(one) for one in found)


def _call(node: ast.expr) -> Call:
    if not isinstance(node, ast.Call) or node.args:
        raise ValueError(node)
    given = {one.arg: _value(one.value) for one in node.keywords}
    if None in given:  # **more
        raise ValueError(node)
    name = ast.unparse(node.func)
    if not NAME.fullmatch(name):
        raise ValueError(name)
    return made(name, given)


def _value(node: ast.expr) -> Any:
    match node:
        case ast.Name(id=word) if word in WORDS:
            return WORDS[word]
        case ast.List(elts=values) | ast.Tuple(elts=values):
            return [_value(one) for one in values]
        case ast.Dict(keys=keys, values=values) if None not in keys:
            return {str(_value(key)): _value(value) for key, value in zip(keys, values, strict=True) if key}
        case ast.Constant() | ast.UnaryOp():
            found = ast.literal_eval(node)
            if isinstance(found, str | int | float | bool | None):
                return found
    raise ValueError(node)


FAMILIES = (Lfm(),)
