"""Whether a client may use a route: the server offers it, and the request has a key if it needs
one.
"""

from collections.abc import Mapping

from llmcli.api.errors import ApiError
from llmcli.api.server_settings import ServerSettings
from llmcli.serve.http import api_keys
from llmcli.serve.http.service import Route

PAGE_PATH = "/"
KEY_HEADERS = {"www-authenticate": "Bearer"}  # of a response to a request without a key


def check_access(route: Route | None, headers: Mapping[str, str], settings: ServerSettings) -> None:
    """Raise ApiError if the server does not offer a route (404 or 501), or if a request for it
    lacks its key (401). `route`: None for a path without one, which is not public.
    """
    if route and (option := dict(settings.disabled_paths).get(route.path)):
        # as llama-server: a page that is not offered does not exist
        status = 404 if route.path == PAGE_PATH else 501
        raise ApiError(f"this server does not offer {route.path}; start it with {option}", status)
    if not (route and route.is_public) and not api_keys.is_allowed(headers, settings.keys):
        raise ApiError(
            "this server needs a key: Authorization: Bearer KEY", 401, code="invalid_api_key"
        )
