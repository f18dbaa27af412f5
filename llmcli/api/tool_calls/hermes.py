"""The tool calls of Hermes, Qwen 2.5 and 3, SmolLM3, Granite 4 and many more: `<tool_call>{"name":
…, "arguments": {…}}</tool_call>`.

Models whose template does not support tools are asked in the system text to write this format.
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

OPENING, CLOSING = "<tool_call>", "</tool_call>"


class HermesCalls(ToolCallFormat):
    """A JSON object between two tags for each call. Subclasses accept further pairs of tags."""

    name: ClassVar[str] = "hermes"
    order: ClassVar[int] = 9
    template_marks: ClassVar[tuple[str, ...]] = ("",)
    openings: ClassVar[tuple[str, ...]] = (OPENING,)
    closings: ClassVar[tuple[str, ...]] = (CLOSING,)
    first_call_pattern: ClassVar[str] = json_call_pattern(rf"{OPENING}\s*")

    @property
    def block_endings(self) -> tuple[str, ...]:
        return self.closings

    def parse(self, text: str, is_last: bool) -> ParsedCalls | None:
        opening, closing = next(
            pair
            for pair in zip(self.openings, self.closings, strict=True)
            if text.startswith(pair[0])
        )
        inner = text_between(text, opening, closing, is_last)
        return inner and ParsedCalls(read_calls(json.loads(inner[0])), inner[1])

    def forced_frame(self, name: str) -> tuple[str, str]:
        return self._tagged(name, OPENING, CLOSING)

    def optional_frames(self, name: str) -> dict[str, tuple[str, str]]:
        return {
            opening: self._tagged(name, opening, closing)
            for opening, closing in zip(self.openings, self.closings, strict=True)
        }

    def _tagged(self, name: str, opening: str, closing: str) -> tuple[str, str]:
        return f'{opening}\n{{"name": {json.dumps(name)}, "arguments": ', "}\n" + closing


FAMILIES = (HermesCalls(),)
