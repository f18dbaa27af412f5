"""`<|tool_call|>[{"name": …, "arguments": {…}}]`: Granite 3 and Phi-4-mini."""

import json
from typing import ClassVar

from llmcli.api.tool_calls.base import Family, Taken, calls, keyed

OPENS, CLOSES = "<|tool_call|>", "<|/tool_call|>"


class Granite(Family):
    """One list of calls; Phi ends it with a mark."""

    name: ClassVar[str] = "granite"
    order: ClassVar[int] = 3
    marks: ClassVar[tuple[str, ...]] = (OPENS,)
    opens: ClassVar[tuple[str, ...]] = (OPENS,)
    closes: ClassVar[tuple[str, ...]] = (CLOSES,)
    last: ClassVar[bool] = True
    begins: ClassVar[str] = keyed(r"<\|tool_call\|>\s*\[?\s*")
    goes_on: ClassVar[str] = keyed(r"\s*\}\s*,\s*")

    def take(self, text: str, over: bool) -> Taken | None:
        if not over:
            return None
        return Taken(
            calls(json.loads(text.removeprefix(OPENS).strip().removesuffix(CLOSES))), len(text)
        )

    def frame(self, name: str) -> tuple[str, str]:
        return f'{{"name": {json.dumps(name)}, "arguments": ', "}"

    @property
    def around(self) -> tuple[str, str | None, str]:
        return OPENS + "[", ", ", "]"


FAMILIES = (Granite(),)
