"""How model families write tool calls, one file each. The first format that fits a chat template is
taken; hermes fits any.
"""

import functools

from llmcli.api.tool_calls.base import Family
from quant.registry import collect


@functools.cache
def families() -> tuple[Family, ...]:
    """Return every format, those with rarer marks first."""
    formats = collect("llmcli.api.tool_calls", "FAMILIES").values()
    return tuple(sorted(formats, key=lambda family: family.order))


def family(template: str) -> Family:
    """Return the format of a chat template; hermes if it has no family's marks."""
    return next(family for family in families() if family.fits(template))


def marks() -> list[str]:
    """Return all marks of all formats, sorted: where a mark is a control token, the runner must not
    hide it.
    """
    return sorted({word for format_ in families() for word in format_.words})
