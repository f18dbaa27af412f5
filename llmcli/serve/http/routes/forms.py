"""The paths of all API forms: they respond with one document, or with Server-Sent Events while
tokens are drawn.
"""

from starlette.requests import Request
from starlette.responses import Response

from llmcli.api import registry
from llmcli.serve.http.exchange import SHORT, answered, asked, body
from llmcli.serve.http.service import Route, Service


async def ask(service: Service, request: Request) -> Response:
    """Read the body as the path's form, submit its requests, and respond in its format."""
    path = registry.form(request.url.path).path
    document = await body(request, service.settings.max_body)
    # uvicorn has already checked that the length is a number
    short = int(request.headers.get("content-length", SHORT + 1)) <= SHORT
    form = await asked(service.bridge, path, document, service.settings, short)
    return await answered(service, request, form)


def _short_paths(path: str) -> tuple[str, ...]:
    return (path.removeprefix("/v1"),) if path.startswith("/v1") else ()


ROUTES = tuple(Route(path, ask, ("POST",), _short_paths(path)) for path in registry.forms())
