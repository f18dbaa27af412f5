"""The formats in which models write tool calls, with one file for each. A model uses the first
format that fits its chat template.
"""

import functools

from llmcli.api.tool_calls.base import ToolCallFormat
from quant.registry import collect


@functools.cache
def all_formats() -> tuple[ToolCallFormat, ...]:
    """Return every format, in the order in which find_format tries them."""
    formats = collect("llmcli.api.tool_calls", "FAMILIES").values()
    return tuple(sorted(formats, key=lambda call_format: call_format.order))


def find_format(template: str) -> ToolCallFormat:
    """Return the first format whose marks are in a chat template. The hermes format comes last and
    fits any template.
    """
    return next(
        call_format for call_format in all_formats() if call_format.matches_template(template)
    )


def call_marks() -> list[str]:
    """Return the marks of all formats, sorted. Some marks are control tokens, which the runner
    usually removes from an answer's text; these must stay, because calls are recognized by them.
    """
    return sorted({mark for call_format in all_formats() for mark in call_format.visible_marks})
