"""The tool calls of Command R7B and Command A: `<|START_ACTION|>[{"tool_call_id": "0", "tool_name":
…, "parameters": {…}}]<|END_ACTION|>`.
"""

import json
from typing import ClassVar

from llmcli.api.tool_calls.base import (
    ParsedCalls,
    ToolCallFormat,
    json_call_pattern,
    read_calls,
    text_between,
)

NAME_KEY_PATTERN = r'(?:tool_call_id"\s*:\s*"[^"]*"\s*,\s*")?tool_name'
OPENING, CLOSING = "<|START_ACTION|>", "<|END_ACTION|>"


class CommandRCalls(ToolCallFormat):
    """A JSON list of calls between two marks."""

    name: ClassVar[str] = "command"
    order: ClassVar[int] = 1
    template_marks: ClassVar[tuple[str, ...]] = (OPENING,)
    openings: ClassVar[tuple[str, ...]] = (OPENING,)
    closings: ClassVar[tuple[str, ...]] = (CLOSING,)
    first_call_pattern: ClassVar[str] = json_call_pattern(
        r"<\|START_ACTION\|>\s*\[?\s*", NAME_KEY_PATTERN, "parameters"
    )
    next_call_pattern: ClassVar[str] = json_call_pattern(
        r"\s*\}\s*,\s*", NAME_KEY_PATTERN, "parameters"
    )

    def parse(self, text: str, is_last: bool) -> ParsedCalls | None:
        inner = text_between(text, OPENING, CLOSING, is_last)
        return inner and ParsedCalls(read_calls(json.loads(inner[0]), name="tool_name"), inner[1])

    def forced_frame(self, name: str) -> tuple[str, str]:
        return f'{{"tool_call_id": "0", "tool_name": {json.dumps(name)}, "parameters": ', "}"

    @property
    def wrappers(self) -> tuple[str, str | None, str]:
        return OPENING + "[", ",\n", "]" + CLOSING


FAMILIES = (CommandRCalls(),)
