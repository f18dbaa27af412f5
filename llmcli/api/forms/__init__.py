"""FORMS: a dictionary of the API forms by path."""

from llmcli.api.forms.base import ApiForm
from quant.registry import collect

FORMS: dict[str, type[ApiForm]] = collect(__name__, "FORMS", key="path")


def find_form(path: str) -> type[ApiForm] | None:
    """Return the form of a path, with or without the prefix /v1; None if no form has this path."""
    return FORMS.get(path) or FORMS.get(f"/v1{path}")
