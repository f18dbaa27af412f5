"""DeepSeek's tool calls:
`<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>name<｜tool▁sep｜>{…}<｜tool▁call▁end｜><｜tool▁calls▁end｜>`.

V3 and R1 write `function<｜tool▁sep｜>name`, and the arguments as a fenced code block of Markdown.
"""

import json
import re
from typing import ClassVar

from llmcli.api.tool_calls.base import (
    ParsedCalls,
    ToolCall,
    ToolCallFormat,
    make_call,
    text_between,
)

BLOCK_OPENING, BLOCK_CLOSING = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL_OPENING, NAME_SEPARATOR, CALL_CLOSING = (
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
)
HEAD_PATTERN = rf"{CALL_OPENING}(?:function{NAME_SEPARATOR}(?=[^\n]*\n))?(?P<name>[^\n<]+)(?:{NAME_SEPARATOR}|\n```json\n)\s*(?=\{{)"
FENCED_PATTERN = re.compile(r"([^\n]*)\n```json\n(.*)\n?```\s*", re.DOTALL)


class DeepSeekCalls(ToolCallFormat):
    """Each call is between two marks, and an outer pair of marks is around all calls."""

    name: ClassVar[str] = "deepseek"
    order: ClassVar[int] = 1
    template_marks: ClassVar[tuple[str, ...]] = (BLOCK_OPENING,)
    openings: ClassVar[tuple[str, ...]] = (BLOCK_OPENING,)
    closings: ClassVar[tuple[str, ...]] = (
        BLOCK_CLOSING,
        CALL_OPENING,
        NAME_SEPARATOR,
        CALL_CLOSING,
    )
    first_call_pattern: ClassVar[str] = rf"{BLOCK_OPENING}\s*{HEAD_PATTERN}"
    next_call_pattern: ClassVar[str] = rf"[\s`]*{CALL_CLOSING}\s*{HEAD_PATTERN}"

    def parse(self, text: str, is_last: bool) -> ParsedCalls | None:
        inner = text_between(text, BLOCK_OPENING, BLOCK_CLOSING, is_last)
        if inner is None:
            return None
        bodies = [body.split(CALL_CLOSING)[0] for body in inner[0].split(CALL_OPENING)[1:]]
        if not bodies:
            raise ValueError(text)
        return ParsedCalls(tuple(_call(body) for body in bodies), inner[1])

    def forced_frame(self, name: str) -> tuple[str, str]:
        return CALL_OPENING + name + NAME_SEPARATOR, CALL_CLOSING

    @property
    def wrappers(self) -> tuple[str, str | None, str]:
        return BLOCK_OPENING, "", BLOCK_CLOSING


def _call(text: str) -> ToolCall:
    name, _, arguments = text.partition(NAME_SEPARATOR)
    if fenced := FENCED_PATTERN.fullmatch(arguments):
        name, arguments = fenced[1], fenced[2]
    if not name.strip():
        raise ValueError(text)
    return make_call(name.strip(), json.loads(arguments))


FAMILIES = (DeepSeekCalls(),)
