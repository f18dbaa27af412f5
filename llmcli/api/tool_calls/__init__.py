"""The formats in which model families write tool calls, one file for each. A model uses the first
format that fits its chat template; hermes fits any template.
"""

import functools

from llmcli.api.tool_calls.base import ToolCallFormat
from quant.registry import collect


@functools.cache
def all_formats() -> tuple[ToolCallFormat, ...]:
    """Return every format, in the order in which find_format tries them."""
    formats = collect("llmcli.api.tool_calls", "FAMILIES").values()
    return tuple(sorted(formats, key=lambda family: family.order))


def find_format(template: str) -> ToolCallFormat:
    """Return the first format whose marks are in a chat template. hermes is last and fits any
    template.
    """
    return next(family for family in all_formats() if family.matches_template(template))


def call_marks() -> list[str]:
    """Return all marks of all formats, sorted. If a mark is a control token of the model, the
    runner must leave it in the answer's text.
    """
    return sorted({word for format_ in all_formats() for word in format_.visible_marks})
