"""`<|tool_call_start|>[name(key="text", other=3)]<|tool_call_end|>`: LFM2, with Python keywords.

A forced call is written as JSON, which these models also write when they are asked to.
"""

import json
from typing import ClassVar

from llmcli.api.tool_calls.base import Family, Form, Taken, calls, keyed, within
from llmcli.api.tool_calls.keyword_arguments import CALL, Keywords

OPENS, CLOSES = "<|tool_call_start|>", "<|tool_call_end|>"


class Lfm(Family):
    """One list of calls."""

    name: ClassVar[str] = "lfm"
    order: ClassVar[int] = 1
    marks: ClassVar[tuple[str, ...]] = (
        OPENS,
        "List of tools: <|tool_list_start|>",
        "List of tools: [",
    )
    opens: ClassVar[tuple[str, ...]] = (OPENS,)
    closes: ClassVar[tuple[str, ...]] = (CLOSES,)
    begins: ClassVar[str] = keyed(r"<\|tool_call_start\|>\s*\[?\s*")
    goes_on: ClassVar[str] = keyed(r"\s*\}\s*,\s*")
    form: ClassVar[Form | None] = Keywords(
        r"<\|tool_call_start\|>\s*\[?\s*" + CALL, r"\s*,\s*" + CALL
    )

    def take(self, text: str, over: bool) -> Taken | None:
        inner = within(text, OPENS, CLOSES, over)
        return inner and Taken(calls(json.loads(inner[0])), inner[1])

    def frame(self, name: str) -> tuple[str, str]:
        return f'{{"name": {json.dumps(name)}, "arguments": ', "}"

    @property
    def around(self) -> tuple[str, str | None, str]:
        return OPENS + "[", ", ", "]" + CLOSES


FAMILIES = (Lfm(),)
