"""The tool calls of Llama 3.1 and later: `{"name": …, "parameters": {…}}`, alone or after
`<|python_tag|>`.
"""

import json
from typing import ClassVar

from llmcli.api.tool_calls.base import ParsedCalls, ToolCallFormat, json_call_pattern, read_calls

PYTHON_TAG = "<|python_tag|>"
TYPED_NAME_PATTERN = r'\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"'
NAME_OPENING, TYPE_OPENING = '{"name"', '{"type": "function"'


class LlamaCalls(ToolCallFormat):
    """The whole answer is one call, or several calls separated by semicolons."""

    name: ClassVar[str] = "llama"
    order: ClassVar[int] = 2
    template_marks: ClassVar[tuple[str, ...]] = (
        PYTHON_TAG,
        "<|start_header_id|>ipython",
        '"parameters": dictionary of argument',
    )
    openings: ClassVar[tuple[str, ...]] = (PYTHON_TAG, NAME_OPENING, TYPE_OPENING, "{\n")
    starts_answer: ClassVar[bool] = True
    ends_answer: ClassVar[bool] = True
    first_call_pattern: ClassVar[str] = json_call_pattern(r"(?:<\|python_tag\|>)?\s*").replace(
        r'\{\s*"name"', TYPED_NAME_PATTERN, 1
    )
    next_call_pattern: ClassVar[str] = json_call_pattern(r"\s*\}[;\s]*").replace(
        r'\{\s*"name"', TYPED_NAME_PATTERN, 1
    )

    def parse(self, text: str, is_last: bool) -> ParsedCalls | None:
        if not is_last:
            return None
        decoder, values, body = json.JSONDecoder(), [], text.removeprefix(PYTHON_TAG).strip()
        while body:
            value, end = decoder.raw_decode(body)
            values.append(value)
            body = body[end:].lstrip("; \n")
        return ParsedCalls(read_calls(values), len(text))

    def forced_frame(self, name: str) -> tuple[str, str]:
        return f'{{"name": {json.dumps(name)}, "parameters": ', "}"

    def optional_frames(self, name: str) -> dict[str, tuple[str, str]]:
        """Return the texts around the arguments of an optional call, by its opening mark. A call
        without `<|python_tag|>` is recognized by its first key, so a call with different white
        space before this key is neither recognized nor constrained.
        """
        before, after = self.forced_frame(name)
        return {
            PYTHON_TAG: (PYTHON_TAG + before, after),
            NAME_OPENING: (before, after),
            TYPE_OPENING: (f"{TYPE_OPENING}, {before[1:]}", after),
        }

    @property
    def wrappers(self) -> tuple[str, str | None, str]:
        return "", "; ", ""


FAMILIES = (LlamaCalls(),)
