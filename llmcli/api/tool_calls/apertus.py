"""`<|tools_prefix|>[{"name": {…}}, …]<|tools_suffix|>`: Apertus."""

import json
from typing import ClassVar

from llmcli.api.tool_calls.base import Call, Family, Taken, made, within

ONE = r'\{\s*(?P<json>"(?:[^"\\]|\\.)*")\s*:\s*(?=\{)'
OPENS, CLOSES = "<|tools_prefix|>", "<|tools_suffix|>"


class Apertus(Family):
    """A list of objects, each with one name and its arguments."""

    name: ClassVar[str] = "apertus"
    order: ClassVar[int] = 1
    marks: ClassVar[tuple[str, ...]] = (OPENS,)
    opens: ClassVar[tuple[str, ...]] = (OPENS,)
    closes: ClassVar[tuple[str, ...]] = (CLOSES,)
    begins: ClassVar[str] = rf"<\|tools_prefix\|>\s*\[\s*{ONE}"
    goes_on: ClassVar[str] = rf"\s*\}}\s*,\s*{ONE}"

    def take(self, text: str, over: bool) -> Taken | None:
        inner = within(text, OPENS, CLOSES, over)
        if inner is None:
            return None
        objects = json.loads(inner[0])
        if not isinstance(objects, list) or not objects:
            raise ValueError(objects)
        return Taken(tuple(_call(object_) for object_ in objects), inner[1])

    def frame(self, name: str) -> tuple[str, str]:
        return f"{{{json.dumps(name)}: ", "}"

    @property
    def around(self) -> tuple[str, str | None, str]:
        return OPENS + "[", ", ", "]" + CLOSES


def _call(entry: object) -> Call:
    if not isinstance(entry, dict) or len(entry) != 1:
        raise ValueError(entry)
    ((name, arguments),) = entry.items()
    return made(name, arguments)


FAMILIES = (Apertus(),)
