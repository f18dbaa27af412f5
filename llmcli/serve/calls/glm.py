"""`<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>`: GLM 4.5 and later.

A forced call is written as hermes has it.
"""

import re
from typing import ClassVar

from llmcli.serve.calls.base import Taken, made, within
from llmcli.serve.calls.coder import value
from llmcli.serve.calls.hermes import CLOSES, OPENS, Hermes

PAIR = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)


class Glm(Hermes):
    """The name, then pairs of key and value."""

    name: ClassVar[str] = "glm"
    order: ClassVar[int] = 1
    marks: ClassVar[tuple[str, ...]] = ("<arg_key>",)

    def take(self, text: str, over: bool) -> Taken | None:
        inner = within(text, OPENS, CLOSES, over=False)  # what has no end may lack arguments
        if inner is None:
            return None
        name = inner[0].partition("<arg_key>")[0].strip()
        if name.startswith("{") or not name:
            return super().take(text, over)
        given = {key.strip(): value(words.strip()) for key, words in PAIR.findall(inner[0])}
        return Taken((made(name, given),), inner[1])


FAMILIES = (Glm(),)
