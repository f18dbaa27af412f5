"""What the server answers to, read from its folders: routes/ by path, schema/ by endpoint."""

import functools
from typing import Any

from quant.registry import collect


@functools.cache
def routes() -> dict[str, Any]:
    """Every Route by its first path."""
    return collect("llmcli.serve.routes", "ROUTES", key="path")


@functools.cache
def forms() -> dict[str, Any]:
    """Every Form by its path: OpenAI's ways to ask for an answer."""
    return collect("llmcli.serve.schema", "FORMS", key="path")


def form(path: str) -> Any:
    """The Form that answers a path, which may stand without /v1; None where none does."""
    return forms().get(path) or forms().get(f"/v1{path}")
