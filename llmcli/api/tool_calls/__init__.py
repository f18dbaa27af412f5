"""How model families write tool calls, one file each. The first format that fits a chat template is
taken; hermes fits any.
"""

import functools

from llmcli.api.tool_calls.base import ToolCallFormat
from quant.registry import collect


@functools.cache
def all_formats() -> tuple[ToolCallFormat, ...]:
    """Return every format, those with rarer marks first."""
    formats = collect("llmcli.api.tool_calls", "FAMILIES").values()
    return tuple(sorted(formats, key=lambda family: family.order))


def find_format(template: str) -> ToolCallFormat:
    """Return the format of a chat template; hermes if it has no family's marks."""
    return next(family for family in all_formats() if family.matches_template(template))


def call_marks() -> list[str]:
    """Return all marks of all formats, sorted: where a mark is a control token, the runner must not
    hide it.
    """
    return sorted({word for format_ in all_formats() for word in format_.visible_marks})
