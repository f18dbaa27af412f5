"""FORMS: the API forms by URL path. A form (base.py) parses the requests of one API and writes its
responses.
"""

from llmcli.api.forms.base import ApiForm
from quant.registry import collect

FORMS: dict[str, type[ApiForm]] = collect(__name__, "FORMS", key="path")
PREFIX = "/v1"
# Further paths, each with the path of its form. In llama-server, /completions is not OpenAI's.
OTHER_NAMES = {"/completions": "/completion"}


def find_form(path: str) -> type[ApiForm] | None:
    """Return the form for a URL path: that of a form, or one of its further_paths(). Return None if
    no API has this path.
    """
    path = OTHER_NAMES.get(path, path)
    return FORMS.get(path) or FORMS.get(f"{PREFIX}{path}")


def further_paths(path: str) -> tuple[str, ...]:
    """Return the other URL paths of the form with this path, which llama-server has, too: the path
    without the prefix /v1, and other names.
    """
    names = tuple(name for name, named_path in OTHER_NAMES.items() if named_path == path)
    short = path.removeprefix(PREFIX)
    return names if short == path or short in OTHER_NAMES else (short, *names)
