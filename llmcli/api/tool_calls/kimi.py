"""The tool calls of Kimi K2:
`<|tool_call_begin|>functions.name:0<|tool_call_argument_begin|>{…}<|tool_call_end|>`.

All calls are between `<|tool_calls_section_begin|>` and `<|tool_calls_section_end|>`. The model
writes an id for each call, and its template repeats this id with the result of the call.
"""

import json
import re
from typing import ClassVar

from llmcli.api.tool_calls.base import (
    ParsedCalls,
    ToolCall,
    ToolCallFormat,
    make_call,
    text_between,
)

BLOCK_OPENING, BLOCK_CLOSING = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL_OPENING, ARGUMENTS_OPENING, CALL_CLOSING = (
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
)
HEAD_PATTERN = (
    rf"{re.escape(CALL_OPENING)}(?P<id>\s*(?:functions\.)?(?P<name>[\w.-]+):\d+\s*)"
    rf"{re.escape(ARGUMENTS_OPENING)}\s*(?=\{{)"
)
ID_PATTERN = re.compile(r"\s*(?:functions\.)?([\w.-]+):\d+\s*")


class KimiCalls(ToolCallFormat):
    """A call consists of its id, which contains the function's name and a number, and its
    arguments.
    """

    name: ClassVar[str] = "kimi"
    order: ClassVar[int] = 1
    template_marks: ClassVar[tuple[str, ...]] = (BLOCK_OPENING,)
    openings: ClassVar[tuple[str, ...]] = (BLOCK_OPENING,)
    closings: ClassVar[tuple[str, ...]] = (
        BLOCK_CLOSING,
        CALL_OPENING,
        ARGUMENTS_OPENING,
        CALL_CLOSING,
    )
    first_call_pattern: ClassVar[str] = rf"{re.escape(BLOCK_OPENING)}\s*{HEAD_PATTERN}"
    next_call_pattern: ClassVar[str] = rf"\s*{re.escape(CALL_CLOSING)}\s*{HEAD_PATTERN}"

    def model_id(self, id_: str | None, name: str, number: int) -> str:
        """Return the model's id for the first call of a block. Later calls get a new id, because a
        model may repeat an id, and the results of two calls with equal ids could not be
        distinguished.
        """

        return f"functions.{name}:{number}" if number or not id_ else id_.strip()

    def parse(self, text: str, is_last: bool) -> ParsedCalls | None:
        inner = text_between(text, BLOCK_OPENING, BLOCK_CLOSING, is_last)
        if inner is None:
            return None
        calls = tuple(
            _call(call_text, number)
            for number, call_text in enumerate(inner[0].split(CALL_OPENING)[1:])
        )
        if not calls:
            raise ValueError(text)
        return ParsedCalls(calls, inner[1])

    def forced_frame(self, name: str) -> tuple[str, str]:
        return f"{CALL_OPENING}functions.{name}:0{ARGUMENTS_OPENING}", CALL_CLOSING

    @property
    def wrappers(self) -> tuple[str, str | None, str]:
        return BLOCK_OPENING, "", BLOCK_CLOSING


def _call(text: str, number: int) -> ToolCall:
    head, _, arguments = text.partition(ARGUMENTS_OPENING)
    match = ID_PATTERN.fullmatch(head)
    if not match:
        raise ValueError(text)
    id_ = f"functions.{match[1]}:{number}" if number else head.strip()
    return make_call(match[1], json.loads(arguments.partition(CALL_CLOSING)[0]), id_)


FAMILIES = (KimiCalls(),)
