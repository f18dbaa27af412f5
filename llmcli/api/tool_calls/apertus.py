"""Apertus's tool calls: `<|tools_prefix|>[{"name": {…}}, …]<|tools_suffix|>`."""

import json
from typing import ClassVar

from llmcli.api.tool_calls.base import (
    ParsedCalls,
    ToolCall,
    ToolCallFormat,
    make_call,
    text_between,
)

CALL_PATTERN = r'\{\s*(?P<json>"(?:[^"\\]|\\.)*")\s*:\s*(?=\{)'
OPENING, CLOSING = "<|tools_prefix|>", "<|tools_suffix|>"


class ApertusCalls(ToolCallFormat):
    """A JSON list of objects. An object has one key, the function's name; its value is the
    arguments.
    """

    name: ClassVar[str] = "apertus"
    order: ClassVar[int] = 1
    template_marks: ClassVar[tuple[str, ...]] = (OPENING,)
    openings: ClassVar[tuple[str, ...]] = (OPENING,)
    closings: ClassVar[tuple[str, ...]] = (CLOSING,)
    first_call_pattern: ClassVar[str] = rf"<\|tools_prefix\|>\s*\[\s*{CALL_PATTERN}"
    next_call_pattern: ClassVar[str] = rf"\s*\}}\s*,\s*{CALL_PATTERN}"

    def parse(self, text: str, is_last: bool) -> ParsedCalls | None:
        inner = text_between(text, OPENING, CLOSING, is_last)
        if inner is None:
            return None
        objects = json.loads(inner[0])
        if not isinstance(objects, list) or not objects:
            raise ValueError(objects)
        return ParsedCalls(tuple(_call(object_) for object_ in objects), inner[1])

    def forced_frame(self, name: str) -> tuple[str, str]:
        return f"{{{json.dumps(name)}: ", "}"

    @property
    def wrappers(self) -> tuple[str, str | None, str]:
        return OPENING + "[", ", ", "]" + CLOSING


def _call(entry: object) -> ToolCall:
    if not isinstance(entry, dict) or len(entry) != 1:
        raise ValueError(entry)
    ((name, arguments),) = entry.items()
    return make_call(name, arguments)


FAMILIES = (ApertusCalls(),)
