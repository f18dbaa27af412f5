"""`[TOOL_CALLS][{"name": …, "arguments": {…}}]`, or since 2025 `[TOOL_CALLS]name[ARGS]{…}`:
Mistral.
"""

import json
import re
from typing import ClassVar

from llmcli.api.tool_calls.base import Call, Family, Taken, calls, keyed, made

OPENS, ARGS = "[TOOL_CALLS]", "[ARGS]"
NAMED = r"\s*(?:\[TOOL_CALLS\])?\s*(?P<name>[\w.-]+)(?:\[CALL_ID\]\w+)?\[ARGS\]\s*(?=\{)"
HEAD = re.compile(r"\s*(?:\[TOOL_CALLS\])?\s*([\w.-]+)(?:\[CALL_ID\]\w+)?\[ARGS\]\s*")


class Mistral(Family):
    """A list of calls, which ends with the answer."""

    name: ClassVar[str] = "mistral"
    order: ClassVar[int] = 2
    marks: ClassVar[tuple[str, ...]] = (OPENS,)
    opens: ClassVar[tuple[str, ...]] = (OPENS,)
    closes: ClassVar[tuple[str, ...]] = (ARGS, "[CALL_ID]")
    last: ClassVar[bool] = True
    begins: ClassVar[str] = keyed(r"\[TOOL_CALLS\]\s*\[?\s*")
    goes_on: ClassVar[str] = keyed(r'(?:\s*,\s*"id"\s*:\s*"[^"]*")?\s*\}\s*,\s*')

    def fits(self, template: str) -> bool:
        return super().fits(template) and ARGS not in template

    def id(self, digits: str) -> str:
        """Return nine letters: these templates accept no other length."""
        return digits[:9]

    def take(self, text: str, over: bool) -> Taken | None:
        if not over:
            return None
        body = text.removeprefix(OPENS).strip()
        if body.startswith(("[", "{")):
            value, end = json.JSONDecoder().raw_decode(body)
            if body[end:].strip():
                raise ValueError(body[end:])
            return Taken(calls(value), len(text))
        return Taken(_named(body), len(text))

    def frame(self, name: str) -> tuple[str, str]:
        return f'{{"name": {json.dumps(name)}, "arguments": ', "}"

    @property
    def around(self) -> tuple[str, str | None, str]:
        return OPENS + "[", ", ", "]"


class Named(Mistral):
    """The later form: name and arguments without a list."""

    name: ClassVar[str] = "mistral-named"
    order: ClassVar[int] = 1
    begins: ClassVar[str] = NAMED
    goes_on: ClassVar[str] = NAMED

    def fits(self, template: str) -> bool:
        return OPENS in template and ARGS in template

    def frame(self, name: str) -> tuple[str, str]:
        return OPENS + name + ARGS, ""

    @property
    def around(self) -> tuple[str, str | None, str]:
        return "", "", ""


def _named(text: str) -> tuple[Call, ...]:
    calls_ = []
    while text:
        head = HEAD.match(text)
        if not head:
            raise ValueError(text)
        arguments, end = json.JSONDecoder().raw_decode(text, head.end())
        calls_.append(made(head[1], arguments))
        text = text[end:].strip()
    if not calls_:
        raise ValueError(text)
    return tuple(calls_)


FAMILIES = (Mistral(), Named())
