"""Mistral's tool calls: `[TOOL_CALLS][{"name": …, "arguments": {…}}]`, or since 2025
`[TOOL_CALLS]name[ARGS]{…}`.
"""

import json
import re
from typing import ClassVar

from llmcli.api.tool_calls.base import (
    ParsedCalls,
    ToolCall,
    ToolCallFormat,
    json_call_pattern,
    make_call,
    read_calls,
)

OPENING, ARGUMENTS_OPENING = "[TOOL_CALLS]", "[ARGS]"
NAMED_CALL_PATTERN = (
    r"\s*(?:\[TOOL_CALLS\])?\s*(?P<name>[\w.-]+)(?:\[CALL_ID\]\w+)?\[ARGS\]\s*(?=\{)"
)
HEAD_PATTERN = re.compile(r"\s*(?:\[TOOL_CALLS\])?\s*([\w.-]+)(?:\[CALL_ID\]\w+)?\[ARGS\]\s*")


class MistralListCalls(ToolCallFormat):
    """The earlier format: a JSON list of calls at the end of the answer."""

    name: ClassVar[str] = "mistral"
    order: ClassVar[int] = 2
    template_marks: ClassVar[tuple[str, ...]] = (OPENING,)
    openings: ClassVar[tuple[str, ...]] = (OPENING,)
    closings: ClassVar[tuple[str, ...]] = (ARGUMENTS_OPENING, "[CALL_ID]")
    ends_answer: ClassVar[bool] = True
    first_call_pattern: ClassVar[str] = json_call_pattern(r"\[TOOL_CALLS\]\s*\[?\s*")
    next_call_pattern: ClassVar[str] = json_call_pattern(
        r'(?:\s*,\s*"id"\s*:\s*"[^"]*")?\s*\}\s*,\s*'
    )

    def matches_template(self, template: str) -> bool:
        return super().matches_template(template) and ARGUMENTS_OPENING not in template

    def make_id(self, digits: str) -> str:
        """Return an id of nine characters, because Mistral's templates accept no other length."""
        return digits[:9]

    def parse(self, text: str, is_last: bool) -> ParsedCalls | None:
        if not is_last:
            return None
        body = text.removeprefix(OPENING).strip()
        if body.startswith(("[", "{")):
            value, end = json.JSONDecoder().raw_decode(body)
            if body[end:].strip():
                raise ValueError(body[end:])
            return ParsedCalls(read_calls(value), len(text))
        return ParsedCalls(_named(body), len(text))

    def forced_frame(self, name: str) -> tuple[str, str]:
        return f'{{"name": {json.dumps(name)}, "arguments": ', "}"

    @property
    def wrappers(self) -> tuple[str, str | None, str]:
        return OPENING + "[", ", ", "]"


class MistralNamedCalls(MistralListCalls):
    """The later format: for each call the function's name, then the arguments."""

    name: ClassVar[str] = "mistral-named"
    order: ClassVar[int] = 1
    first_call_pattern: ClassVar[str] = NAMED_CALL_PATTERN
    next_call_pattern: ClassVar[str] = NAMED_CALL_PATTERN

    def matches_template(self, template: str) -> bool:
        return OPENING in template and ARGUMENTS_OPENING in template

    def forced_frame(self, name: str) -> tuple[str, str]:
        return OPENING + name + ARGUMENTS_OPENING, ""

    @property
    def wrappers(self) -> tuple[str, str | None, str]:
        return "", "", ""


def _named(text: str) -> tuple[ToolCall, ...]:
    """Return the calls in a text of names and arguments. Raises ValueError if there is no call."""
    calls = []
    while text:
        head = HEAD_PATTERN.match(text)
        if not head:
            raise ValueError(text)
        arguments, end = json.JSONDecoder().raw_decode(text, head.end())
        calls.append(make_call(head[1], arguments))
        text = text[end:].strip()
    if not calls:
        raise ValueError(text)
    return tuple(calls)


FAMILIES = (MistralListCalls(), MistralNamedCalls())
