"""`<tool_call>{"name": …, "arguments": {…}}</tool_call>`: Hermes, Qwen 2.5 and 3, SmolLM3, Granite
4 and many more.

Models whose template has no tools are asked to write this format, too.
"""

import json
from typing import ClassVar

from llmcli.api.tool_calls.base import Family, Taken, calls, keyed, within

OPENS, CLOSES = "<tool_call>", "</tool_call>"


class Hermes(Family):
    """JSON between two tags, one pair for each call."""

    name: ClassVar[str] = "hermes"
    order: ClassVar[int] = 9
    marks: ClassVar[tuple[str, ...]] = ("",)
    opens: ClassVar[tuple[str, ...]] = (OPENS,)
    closes: ClassVar[tuple[str, ...]] = (CLOSES,)
    begins: ClassVar[str] = keyed(rf"{OPENS}\s*")

    @property
    def ends(self) -> tuple[str, ...]:
        return self.closes

    def take(self, text: str, over: bool) -> Taken | None:
        opens, closes = next(
            pair for pair in zip(self.opens, self.closes, strict=True) if text.startswith(pair[0])
        )
        inner = within(text, opens, closes, over)
        return inner and Taken(calls(json.loads(inner[0])), inner[1])

    def frame(self, name: str) -> tuple[str, str]:
        return self._tagged(name, OPENS, CLOSES)

    def bound(self, name: str) -> dict[str, tuple[str, str]]:
        return {
            opens: self._tagged(name, opens, closes)
            for opens, closes in zip(self.opens, self.closes, strict=True)
        }

    def _tagged(self, name: str, opens: str, closes: str) -> tuple[str, str]:
        return f'{opens}\n{{"name": {json.dumps(name)}, "arguments": ', "}\n" + closes


FAMILIES = (Hermes(),)
