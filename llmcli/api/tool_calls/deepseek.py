"""`<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>name<｜tool▁sep｜>{…}<｜tool▁call▁end｜><｜tool▁calls▁end｜>`:
DeepSeek.

V3 and R1 write `function<｜tool▁sep｜>name`, and the arguments as a fenced block of Markdown.
"""

import json
import re
from typing import ClassVar

from llmcli.api.tool_calls.base import Call, Family, Taken, made, within

BEGIN, END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
ONE, SEP, OVER = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
HEAD = rf"{ONE}(?:function{SEP}(?=[^\n]*\n))?(?P<name>[^\n<]+)(?:{SEP}|\n```json\n)\s*(?=\{{)"
FENCED = re.compile(r"([^\n]*)\n```json\n(.*)\n?```\s*", re.DOTALL)


class DeepSeek(Family):
    """Each call between its own marks, all calls between an outer pair."""

    name: ClassVar[str] = "deepseek"
    order: ClassVar[int] = 1
    marks: ClassVar[tuple[str, ...]] = (BEGIN,)
    opens: ClassVar[tuple[str, ...]] = (BEGIN,)
    closes: ClassVar[tuple[str, ...]] = (END, ONE, SEP, OVER)
    begins: ClassVar[str] = rf"{BEGIN}\s*{HEAD}"
    goes_on: ClassVar[str] = rf"[\s`]*{OVER}\s*{HEAD}"

    def take(self, text: str, over: bool) -> Taken | None:
        inner = within(text, BEGIN, END, over)
        if inner is None:
            return None
        bodies = [body.split(OVER)[0] for body in inner[0].split(ONE)[1:]]
        if not bodies:
            raise ValueError(text)
        return Taken(tuple(_call(body) for body in bodies), inner[1])

    def frame(self, name: str) -> tuple[str, str]:
        return ONE + name + SEP, OVER

    @property
    def around(self) -> tuple[str, str | None, str]:
        return BEGIN, "", END


def _call(text: str) -> Call:
    name, _, arguments = text.partition(SEP)
    if fenced := FENCED.fullmatch(arguments):
        name, arguments = fenced[1], fenced[2]
    if not name.strip():
        raise ValueError(text)
    return made(name.strip(), json.loads(arguments))


FAMILIES = (DeepSeek(),)
