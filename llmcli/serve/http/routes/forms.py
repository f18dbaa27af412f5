"""The routes of all API forms. The response is one document, or Server-Sent Events while tokens are
drawn.
"""

from starlette.requests import Request
from starlette.responses import Response

from llmcli.api.forms import FORMS, find_form
from llmcli.serve.http.exchange import SHORT_BODY_BYTES, build_form, read_body, respond
from llmcli.serve.http.service import Route, Service


async def answer_request(service: Service, request: Request) -> Response:
    """Parse the body with the path's form, submit its requests, and respond in the form's format."""
    requested = find_form(request.url.path)
    assert requested is not None  # every path of this route has a form
    path = requested.path
    document = await read_body(request, service.settings.max_body)
    # the length is a number, because uvicorn has checked it
    short = int(request.headers.get("content-length", SHORT_BODY_BYTES + 1)) <= SHORT_BODY_BYTES
    form = await build_form(service.bridge, path, document, service.settings, short)
    return await respond(service, request, form)


def _short_paths(path: str) -> tuple[str, ...]:
    return (path.removeprefix("/v1"),) if path.startswith("/v1") else ()


ROUTES = tuple(Route(path, answer_request, ("POST",), _short_paths(path)) for path in FORMS)
