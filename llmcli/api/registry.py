"""The routes and the API forms of the server, collected from their folders."""

import functools
from typing import Any

from quant.registry import collect


@functools.cache
def forms() -> dict[str, Any]:
    """Return every ApiForm by its path."""
    return collect("llmcli.api.forms", "FORMS", key="path")


def find_form(path: str) -> Any:
    """Return the ApiForm of a path, with or without the prefix /v1; None if there is none."""
    return forms().get(path) or forms().get(f"/v1{path}")
