"""`<|START_ACTION|>[{"tool_call_id": "0", "tool_name": …, "parameters": {…}}]<|END_ACTION|>`:
Command R7B and A.
"""

import json
from typing import ClassVar

from llmcli.api.tool_calls.base import Family, Taken, calls, keyed, within

NAME = r'(?:tool_call_id"\s*:\s*"[^"]*"\s*,\s*")?tool_name'
OPENS, CLOSES = "<|START_ACTION|>", "<|END_ACTION|>"


class Command(Family):
    """One list of actions."""

    name: ClassVar[str] = "command"
    order: ClassVar[int] = 1
    marks: ClassVar[tuple[str, ...]] = (OPENS,)
    opens: ClassVar[tuple[str, ...]] = (OPENS,)
    closes: ClassVar[tuple[str, ...]] = (CLOSES,)
    begins: ClassVar[str] = keyed(r"<\|START_ACTION\|>\s*\[?\s*", NAME, "parameters")
    goes_on: ClassVar[str] = keyed(r"\s*\}\s*,\s*", NAME, "parameters")

    def take(self, text: str, over: bool) -> Taken | None:
        inner = within(text, OPENS, CLOSES, over)
        return inner and Taken(calls(json.loads(inner[0]), name="tool_name"), inner[1])

    def frame(self, name: str) -> tuple[str, str]:
        return f'{{"tool_call_id": "0", "tool_name": {json.dumps(name)}, "parameters": ', "}"

    @property
    def around(self) -> tuple[str, str | None, str]:
        return OPENS + "[", ",\n", "]" + CLOSES


FAMILIES = (Command(),)
