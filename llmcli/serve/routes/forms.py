"""OpenAI's ways to ask for an answer (schema/): one document, or Server-Sent Events as the tokens come."""

from starlette.requests import Request
from starlette.responses import Response

from llmcli.serve import registry
from llmcli.serve.routes.base import Route, Service
from llmcli.serve.stream import answered, asked, body


async def ask(service: Service, request: Request) -> Response:
    """Read the body as the path's form, ask the engine, write as the form says."""
    path = request.url.path if request.url.path.startswith("/v1") else f"/v1{request.url.path}"
    document = await body(request, service.settings.max_body)
    return await answered(service, request, await asked(service.bridge, path, document, service.settings))


ROUTES = tuple(Route(path, ask, ("POST",), (path.removeprefix("/v1"),)) for path in registry.forms())
