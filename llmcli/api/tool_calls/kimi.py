"""`<|tool_call_begin|>functions.name:0<|tool_call_argument_begin|>{…}<|tool_call_end|>`: Kimi K2.

All calls are in one section (`<|tool_calls_section_begin|>`). The id is the model's own; its
template repeats it with the result.
"""

import json
import re
from typing import ClassVar

from llmcli.api.tool_calls.base import Call, Family, Taken, made, within

BEGIN, END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
ONE, ARGUMENTS, OVER = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
HEAD = (
    rf"{re.escape(ONE)}(?P<id>\s*(?:functions\.)?(?P<name>[\w.-]+):\d+\s*)"
    rf"{re.escape(ARGUMENTS)}\s*(?=\{{)"
)
ID = re.compile(r"\s*(?:functions\.)?([\w.-]+):\d+\s*")


class Kimi(Family):
    """A name and a number, then the arguments."""

    name: ClassVar[str] = "kimi"
    order: ClassVar[int] = 1
    marks: ClassVar[tuple[str, ...]] = (BEGIN,)
    opens: ClassVar[tuple[str, ...]] = (BEGIN,)
    closes: ClassVar[tuple[str, ...]] = (END, ONE, ARGUMENTS, OVER)
    begins: ClassVar[str] = rf"{re.escape(BEGIN)}\s*{HEAD}"
    goes_on: ClassVar[str] = rf"\s*{re.escape(OVER)}\s*{HEAD}"

    def named(self, id_: str | None, name: str, number: int) -> str:
        # Two calls with the same number could not be distinguished by their results.
        return f"functions.{name}:{number}" if number or not id_ else id_.strip()

    def take(self, text: str, over: bool) -> Taken | None:
        inner = within(text, BEGIN, END, over)
        if inner is None:
            return None
        calls = tuple(
            _call(text_of_call, number)
            for number, text_of_call in enumerate(inner[0].split(ONE)[1:])
        )
        if not calls:
            raise ValueError(text)
        return Taken(calls, inner[1])

    def frame(self, name: str) -> tuple[str, str]:
        return f"{ONE}functions.{name}:0{ARGUMENTS}", OVER

    @property
    def around(self) -> tuple[str, str | None, str]:
        return BEGIN, "", END


def _call(text: str, number: int) -> Call:
    head, _, arguments = text.partition(ARGUMENTS)
    match = ID.fullmatch(head)
    if not match:
        raise ValueError(text)
    id_ = f"functions.{match[1]}:{number}" if number else head.strip()
    return made(match[1], json.loads(arguments.partition(OVER)[0]), id_)


FAMILIES = (Kimi(),)
