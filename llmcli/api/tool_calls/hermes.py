"""The tool calls of Hermes, Qwen 2.5 and 3, SmolLM3, Granite 4 and many more: `<tool_call>{"name":
…, "arguments": {…}}</tool_call>`. Some of these models, such as Qwen 2.5 Coder, write the object in
a block of code instead.

Models whose template does not support tools are asked in the system text to write this format.
"""

import json
import re
from typing import ClassVar

from llmcli.api.tool_calls.base import (
    ParsedCalls,
    ToolCallFormat,
    json_call_pattern,
    read_calls,
    text_between,
)

OPENING, CLOSING = "<tool_call>", "</tool_call>"
FENCE = "```"
FENCE_OPENINGS = f"{FENCE}json\n{{", f"{FENCE}\n{{"
FENCE_LINE = rf"{FENCE}(?:json)?\n"
STRING_PATTERN = re.compile(r'"(?:[^"\\]|\\.)*"')
# the words of an object that is a call, up to its arguments
HEAD_PATTERNS = tuple(
    re.compile(pattern)
    for pattern in (
        r"\{",
        '"name"',
        ":",
        STRING_PATTERN.pattern,
        ",",
        '"(?:arguments|parameters)"',
        ":",
    )
)
MAX_OPEN_CHARACTERS = 100  # of a key or name whose end has not arrived


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


class FencedHermesCalls(HermesCalls):
    """Calls between tags, or in blocks of code that contain only the object of a call.

    `tags_only`: the format without blocks of code. It is for strict functions, because a grammar
    cannot tell a block of code that becomes a call from any other.
    """

    openings: ClassVar[tuple[str, ...]] = (OPENING, *FENCE_OPENINGS)
    first_call_pattern: ClassVar[str] = json_call_pattern(rf"(?:{OPENING}|{FENCE_LINE})\s*")
    tags_only: ClassVar[ToolCallFormat | None] = HermesCalls()

    @property
    def visible_marks(self) -> tuple[str, ...]:
        return OPENING, CLOSING

    @property
    def block_endings(self) -> tuple[str, ...]:
        return CLOSING, FENCE

    def parse(self, text: str, is_last: bool) -> ParsedCalls | None:
        if not text.startswith(FENCE):
            return HermesCalls().parse(text, is_last)
        if is_last or not _may_become_call(text):
            raise ValueError(text)
        return None

    def optional_frames(self, name: str) -> dict[str, tuple[str, str]]:
        return HermesCalls().optional_frames(name)


def _may_become_call(text: str) -> bool:
    """Return whether a text that begins with a block of code can still become the head of a call.
    In a complete head, the object of the arguments follows the words of HEAD_PATTERNS.
    """
    position = text.index("{")
    for pattern in HEAD_PATTERNS:
        position = len(text) - len(text[position:].lstrip())
        if position == len(text):
            return True
        if text[position] == '"' and not STRING_PATTERN.match(text, position):
            return len(text) - position <= MAX_OPEN_CHARACTERS
        match = pattern.match(text, position)
        if match is None:
            return False
        position = match.end()
    return not text[position:].strip()


FAMILIES = (FencedHermesCalls(),)
