"""Tool calls of the form `<function_call>{"name": …, "arguments": {…}}</function_call>`."""

import json
from typing import ClassVar

from llmcli.api.tool_calls.base import (
    ParsedCalls,
    ToolCallFormat,
    json_call_pattern,
    read_calls,
    text_between,
)

OPEN, CLOSE = "<function_call>", "</function_call>"


class FunctionTags(ToolCallFormat):
    """A format with the JSON of each call between two tags."""

    name: ClassVar[str] = "function-tags"
    order: ClassVar[int] = 5
    template_marks: ClassVar[tuple[str, ...]] = (OPEN,)
    openings: ClassVar[tuple[str, ...]] = (OPEN,)
    closings: ClassVar[tuple[str, ...]] = (CLOSE,)
    first_call_pattern: ClassVar[str] = json_call_pattern(rf"{OPEN}\s*")

    def parse(self, text: str, is_last: bool) -> ParsedCalls | None:
        """Parse the call at the beginning of `text`. Return None if more text is needed."""
        inner = text_between(text, OPEN, CLOSE, is_last)
        return inner and ParsedCalls(read_calls(json.loads(inner[0])), inner[1])

    def forced_frame(self, name: str) -> tuple[str, str]:
        """Return the text before and the text after the arguments of a forced call."""
        return f'{OPEN}{{"name": {json.dumps(name)}, "arguments": ', "}" + CLOSE


FAMILIES = (FunctionTags(),)
