"""`<function_call>{"name": …, "arguments": {…}}</function_call>`."""

import json
from typing import ClassVar

from llmcli.api.tool_calls.base import Family, Taken, calls, keyed, within

OPEN, CLOSE = "<function_call>", "</function_call>"


class FunctionTags(Family):
    """JSON between two tags, one pair for each call."""

    name: ClassVar[str] = "function-tags"
    order: ClassVar[int] = 5
    marks: ClassVar[tuple[str, ...]] = (OPEN,)
    opens: ClassVar[tuple[str, ...]] = (OPEN,)
    closes: ClassVar[tuple[str, ...]] = (CLOSE,)
    begins: ClassVar[str] = keyed(rf"{OPEN}\s*")

    def take(self, text: str, over: bool) -> Taken | None:
        """Parse the call at the beginning of `text`; None if more text is needed."""
        inner = within(text, OPEN, CLOSE, over)
        return inner and Taken(calls(json.loads(inner[0])), inner[1])

    def frame(self, name: str) -> tuple[str, str]:
        """Return the text before and after the arguments of a forced call."""
        return f'{OPEN}{{"name": {json.dumps(name)}, "arguments": ', "}" + CLOSE


FAMILIES = (FunctionTags(),)
