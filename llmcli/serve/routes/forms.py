"""OpenAI's ways to ask for an answer (schema/): one document, or Server-Sent Events as the tokens
come.
"""

from starlette.requests import Request
from starlette.responses import Response

from llmcli.serve import registry
from llmcli.serve.routes.base import Route, Service
from llmcli.serve.stream import SHORT, answered, asked, body


async def ask(service: Service, request: Request) -> Response:
    """Read the body as the path's form, ask the engine, write as the form says."""
    path = registry.form(request.url.path).path
    document = await body(request, service.settings.max_body)
    short = (
        int(request.headers.get("content-length", SHORT + 1)) <= SHORT
    )  # its form was checked by the server
    form = await asked(service.bridge, path, document, service.settings, short)
    return await answered(service, request, form)


def _names(path: str) -> tuple[str, ...]:
    return (path.removeprefix("/v1"),) if path.startswith("/v1") else ()


ROUTES = tuple(Route(path, ask, ("POST",), _names(path)) for path in registry.forms())
