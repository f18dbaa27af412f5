"""ROUTES."""

import functools
from typing import Any

from quant.registry import collect


@functools.cache
def routes() -> dict[str, Any]:
    """Return every Route by its first path."""
    return collect("llmcli.serve.http.routes", "ROUTES", key="path")
