"""How model families write function calls, a file each; the first that fits a template is taken,
hermes at last.
"""

import functools

from llmcli.serve.calls.base import Family
from quant.registry import collect


@functools.cache
def families() -> tuple[Family, ...]:
    """Every family, those that look for rarer marks first."""
    found = collect("llmcli.serve.calls", "FAMILIES").values()
    return tuple(sorted(found, key=lambda family: family.order))


def family(template: str) -> Family:
    """The family whose marks a chat template has; hermes where it has none."""
    return next(family for family in families() if family.fits(template))


def marks() -> list[str]:
    """Every word by which calls are told: where a model has a control token for one, it must be
    seen.
    """
    return sorted({word for one in families() for word in one.words})
