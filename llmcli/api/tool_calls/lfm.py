"""LFM2's tool calls, with arguments as Python keywords: `<|tool_call_start|>[name(key="text",
other=3)]<|tool_call_end|>`.

A forced call is written as a JSON object, because a JSON schema can constrain it. These models can
write both.
"""

import json
from typing import ClassVar

from llmcli.api.tool_calls.base import (
    ArgumentFormat,
    ParsedCalls,
    ToolCallFormat,
    json_call_pattern,
    read_calls,
    text_between,
)
from llmcli.api.tool_calls.keyword_arguments import CALL_PATTERN, KeywordArguments

OPENING, CLOSING = "<|tool_call_start|>", "<|tool_call_end|>"


class LfmCalls(ToolCallFormat):
    """A list of calls, written like calls in Python or as JSON objects, between two marks."""

    name: ClassVar[str] = "lfm"
    order: ClassVar[int] = 1
    template_marks: ClassVar[tuple[str, ...]] = (
        OPENING,
        "List of tools: <|tool_list_start|>",
        "List of tools: [",
    )
    openings: ClassVar[tuple[str, ...]] = (OPENING,)
    closings: ClassVar[tuple[str, ...]] = (CLOSING,)
    first_call_pattern: ClassVar[str] = json_call_pattern(r"<\|tool_call_start\|>\s*\[?\s*")
    next_call_pattern: ClassVar[str] = json_call_pattern(r"\s*\}\s*,\s*")
    argument_format: ClassVar[ArgumentFormat | None] = KeywordArguments(
        r"<\|tool_call_start\|>\s*\[?\s*" + CALL_PATTERN, r"\s*,\s*" + CALL_PATTERN
    )

    def parse(self, text: str, is_last: bool) -> ParsedCalls | None:
        inner = text_between(text, OPENING, CLOSING, is_last)
        return inner and ParsedCalls(read_calls(json.loads(inner[0])), inner[1])

    def forced_frame(self, name: str) -> tuple[str, str]:
        return f'{{"name": {json.dumps(name)}, "arguments": ', "}"

    @property
    def wrappers(self) -> tuple[str, str | None, str]:
        return OPENING + "[", ", ", "]" + CLOSING


FAMILIES = (LfmCalls(),)
