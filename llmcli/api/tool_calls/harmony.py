"""The tool calls of gpt-oss: `<|channel|>commentary to=functions.name
<|constrain|>json<|message|>{…}`. The token `<|call|>`, which ends the answer, follows.
"""

import json
import re
from typing import ClassVar

from llmcli.api.tool_calls.base import ParsedCalls, ToolCallFormat, make_call

OPENING = "<|channel|>commentary"
HEAD_PATTERN = re.compile(r"<\|channel\|>commentary to=functions\.([\w.-]+)[^{]*?<\|message\|>")


class HarmonyCalls(ToolCallFormat):
    """A call is a message on the channel "commentary" that is addressed to a function."""

    name: ClassVar[str] = "harmony"
    order: ClassVar[int] = 1
    template_marks: ClassVar[tuple[str, ...]] = ("<|channel|>commentary",)
    openings: ClassVar[tuple[str, ...]] = (OPENING,)
    closings: ClassVar[tuple[str, ...]] = ("<|message|>", "<|constrain|>")
    ends_answer: ClassVar[bool] = True
    first_call_pattern: ClassVar[str] = (
        r"<\|channel\|>commentary to=functions\.(?P<name>[\w.-]+)[^{]*?<\|message\|>\s*(?=\{)"
    )

    def parse(self, text: str, is_last: bool) -> ParsedCalls | None:
        if not is_last:
            return None
        head = HEAD_PATTERN.match(text)
        if not head:
            raise ValueError(text)
        return ParsedCalls((make_call(head[1], json.loads(text[head.end() :])),), len(text))

    def forced_frame(self, name: str) -> tuple[str, str]:
        return f"{OPENING} to=functions.{name} <|constrain|>json<|message|>", ""

    def optional_frames(self, name: str) -> dict[str, tuple[str, str]]:
        # a message on this channel without an address is text
        return {f"{OPENING} to=": self.forced_frame(name)}

    @property
    def wrappers(self) -> tuple[str, str | None, str]:
        return "", None, ""


FAMILIES = (HarmonyCalls(),)
