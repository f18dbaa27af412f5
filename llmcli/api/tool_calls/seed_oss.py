"""Seed-OSS's tool calls:
`<seed:tool_call><function=name><parameter=key>value</parameter></function></seed:tool_call>`.

A forced call is written in the hermes format, because a JSON schema can constrain its arguments.
"""

from typing import ClassVar

from llmcli.api.tool_calls import hermes
from llmcli.api.tool_calls.base import ArgumentFormat, json_call_pattern
from llmcli.api.tool_calls.qwen3_coder import QwenCoderCalls, function_tags

OPENING, CLOSING = "<seed:tool_call>", "</seed:tool_call>"


class SeedOssCalls(QwenCoderCalls):
    """Qwen3-Coder's format with different outer tags."""

    name: ClassVar[str] = "seed"
    order: ClassVar[int] = 0  # before "coder", whose mark is also in Seed-OSS's template
    template_marks: ClassVar[tuple[str, ...]] = (OPENING,)
    openings: ClassVar[tuple[str, ...]] = (OPENING, hermes.OPENING)
    closings: ClassVar[tuple[str, ...]] = (CLOSING, hermes.CLOSING)
    first_call_pattern: ClassVar[str] = json_call_pattern(r"<(?:seed:)?tool_call>\s*")
    argument_format: ClassVar[ArgumentFormat | None] = function_tags(CLOSING)


FAMILIES = (SeedOssCalls(),)
