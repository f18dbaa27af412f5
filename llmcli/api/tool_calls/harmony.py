"""`<|channel|>commentary to=functions.name <|constrain|>json<|message|>{…}`: gpt-oss. `<|call|>`
ends the answer.
"""

import json
import re
from typing import ClassVar

from llmcli.api.tool_calls.base import Family, Taken, made

OPENS = "<|channel|>commentary"
HEAD = re.compile(r"<\|channel\|>commentary to=functions\.([\w.-]+)[^{]*?<\|message\|>")


class Harmony(Family):
    """A message on its own channel, addressed to a function."""

    name: ClassVar[str] = "harmony"
    order: ClassVar[int] = 1
    marks: ClassVar[tuple[str, ...]] = ("<|channel|>commentary",)
    opens: ClassVar[tuple[str, ...]] = (OPENS,)
    closes: ClassVar[tuple[str, ...]] = ("<|message|>", "<|constrain|>")
    last: ClassVar[bool] = True
    begins: ClassVar[str] = (
        r"<\|channel\|>commentary to=functions\.(?P<name>[\w.-]+)[^{]*?<\|message\|>\s*(?=\{)"
    )

    def take(self, text: str, over: bool) -> Taken | None:
        if not over:
            return None
        head = HEAD.match(text)
        if not head:
            raise ValueError(text)
        return Taken((made(head[1], json.loads(text[head.end() :])),), len(text))

    def frame(self, name: str) -> tuple[str, str]:
        return f"{OPENS} to=functions.{name} <|constrain|>json<|message|>", ""

    def bound(self, name: str) -> dict[str, tuple[str, str]]:
        return {f"{OPENS} to=": self.frame(name)}  # commentary without an address is text

    @property
    def around(self) -> tuple[str, str | None, str]:
        return "", None, ""


FAMILIES = (Harmony(),)
