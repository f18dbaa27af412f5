"""FORMS: the API forms by URL path. A form (base.py) parses the requests of one API and writes its
responses.
"""

from llmcli.api.forms.base import ApiForm
from quant.registry import collect

FORMS: dict[str, type[ApiForm]] = collect(__name__, "FORMS", key="path")


def find_form(path: str) -> type[ApiForm] | None:
    """Return the form for a URL path, which may lack the prefix /v1; None if no API has this
    path.
    """
    return FORMS.get(path) or FORMS.get(f"/v1{path}")
