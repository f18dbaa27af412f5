"""`<tool_call><function=name><parameter=key>value</parameter></function></tool_call>`: Qwen3-Coder, Nemotron 3.

A value is JSON where it can be read as JSON, else text. A forced call is written as hermes has it, whose JSON a schema
can hold; these models have seen both.
"""

import re
from typing import Any, ClassVar

from llmcli.serve.calls.base import Taken, made, within
from llmcli.serve.calls.hermes import CLOSES, OPENS, Hermes
from llmcli.strict import strict

FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*)</function>\s*", re.DOTALL)
PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?(?:</parameter>|(?=<parameter=)|\Z)", re.DOTALL)


class Coder(Hermes):
    """Tags for the function and for each argument."""

    name: ClassVar[str] = "coder"
    order: ClassVar[int] = 1
    marks: ClassVar[tuple[str, ...]] = ("<function=",)

    def take(self, text: str, over: bool) -> Taken | None:
        inner = within(text, OPENS, CLOSES, over)
        if inner is None:
            return None
        found = FUNCTION.fullmatch(inner[0])
        if not found:
            return super().take(text, over)
        given = {key.strip(): value(words) for key, words in PARAMETER.findall(found[2])}
        return Taken((made(found[1].strip(), given),), inner[1])


def value(words: str) -> Any:
    """What was written for an argument."""
    try:
        return strict(words)
    except ValueError:
        return words


FAMILIES = (Coder(),)
