"""The tool calls of Granite 3 and Phi-4-mini: `<|tool_call|>[{"name": …, "arguments": {…}}]`."""

import json
from typing import ClassVar

from llmcli.api.tool_calls.base import ParsedCalls, ToolCallFormat, json_call_pattern, read_calls

OPENING, CLOSING = "<|tool_call|>", "<|/tool_call|>"


class GraniteCalls(ToolCallFormat):
    """A JSON list of calls after a mark. Phi writes a closing mark after the list."""

    name: ClassVar[str] = "granite"
    order: ClassVar[int] = 3
    template_marks: ClassVar[tuple[str, ...]] = (OPENING,)
    openings: ClassVar[tuple[str, ...]] = (OPENING,)
    closings: ClassVar[tuple[str, ...]] = (CLOSING,)
    ends_answer: ClassVar[bool] = True
    first_call_pattern: ClassVar[str] = json_call_pattern(r"<\|tool_call\|>\s*\[?\s*")
    next_call_pattern: ClassVar[str] = json_call_pattern(r"\s*\}\s*,\s*")

    def parse(self, text: str, is_last: bool) -> ParsedCalls | None:
        if not is_last:
            return None
        return ParsedCalls(
            read_calls(json.loads(text.removeprefix(OPENING).strip().removesuffix(CLOSING))),
            len(text),
        )

    def forced_frame(self, name: str) -> tuple[str, str]:
        return f'{{"name": {json.dumps(name)}, "arguments": ', "}"

    @property
    def wrappers(self) -> tuple[str, str | None, str]:
        return OPENING + "[", ", ", "]"


FAMILIES = (GraniteCalls(),)
