"""`{"name": …, "parameters": {…}}`, alone or after `<|python_tag|>`: Llama 3.1 and later."""

import json
from typing import ClassVar

from llmcli.api.tool_calls.base import Family, Taken, calls, keyed

TAG = "<|python_tag|>"
TYPED = r'\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"'
NAME, TYPE = '{"name"', '{"type": "function"'


class Llama(Family):
    """The whole answer is one call, or several that are separated by semicolons."""

    name: ClassVar[str] = "llama"
    order: ClassVar[int] = 2
    marks: ClassVar[tuple[str, ...]] = (
        TAG,
        "<|start_header_id|>ipython",
        '"parameters": dictionary of argument',
    )
    opens: ClassVar[tuple[str, ...]] = (TAG, NAME, TYPE, "{\n")
    first: ClassVar[bool] = True
    last: ClassVar[bool] = True
    begins: ClassVar[str] = keyed(r"(?:<\|python_tag\|>)?\s*").replace(r'\{\s*"name"', TYPED, 1)
    goes_on: ClassVar[str] = keyed(r"\s*\}[;\s]*").replace(r'\{\s*"name"', TYPED, 1)

    def take(self, text: str, over: bool) -> Taken | None:
        if not over:
            return None
        decoder, values, body = json.JSONDecoder(), [], text.removeprefix(TAG).strip()
        while body:
            value, end = decoder.raw_decode(body)
            values.append(value)
            body = body[end:].lstrip("; \n")
        return Taken(calls(values), len(text))

    def frame(self, name: str) -> tuple[str, str]:
        return f'{{"name": {json.dumps(name)}, "parameters": ', "}"

    def bound(self, name: str) -> dict[str, tuple[str, str]]:
        """Return the frames by their marks. JSON has no mark but its first key, so a call with
        other spacing is not recognized and not constrained.
        """
        before, after = self.frame(name)
        return {
            TAG: (TAG + before, after),
            NAME: (before, after),
            TYPE: (f"{TYPE}, {before[1:]}", after),
        }

    @property
    def around(self) -> tuple[str, str | None, str]:
        return "", "; ", ""


FAMILIES = (Llama(),)
