"""The ASGI application: routes/ behind the guard and the keys, and the one place where an error
becomes a status.
"""

from collections.abc import Awaitable
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, WebSocketRoute
from starlette.routing import Route as Path

from llmcli.serve import registry
from llmcli.serve.bodies import LATER, Bodies, Room
from llmcli.serve.bridge import Bridge, Busy
from llmcli.serve.guard import Guard
from llmcli.serve.keys import allowed
from llmcli.serve.origins import readable
from llmcli.serve.problems import Problem, document, problem
from llmcli.serve.routes.base import Route, Service
from llmcli.serve.settings import Settings
from llmcli.serve.stream import Gone, json_response
from llmcli.serve.vectors import Vectors
from quant.errors import Refusal

NOBODY = 499  # nginx's status for a client that has gone; it is not sent to anybody


def make_app(bridge: Bridge, settings: Settings) -> Starlette:
    """The application over a bridge; the caller closes the bridge."""
    service = Service(bridge, settings, Vectors(bridge), Room(settings.max_body))
    middleware = [
        Middleware(Guard, settings=settings),
        Middleware(Bodies, room=service.room),
        Middleware(readable, settings=settings),
    ]
    handlers: dict[Any, Any] = {
        Refusal: refused,
        HTTPException: not_here,
        Gone: gone,
        Exception: broken,
    }
    app = Starlette(
        routes=[one for route in registry.routes().values() for one in _paths(route, service)],
        middleware=middleware,
        exception_handlers=handlers,
    )
    app.state.service = service
    return app


def _paths(route: Route, service: Service) -> list[BaseRoute]:
    handle: Any = route.handle
    if route.socket:

        async def talk(socket: Any) -> None:
            if route.open or allowed(socket.headers, service.settings.keys):
                await handle(service, socket)
            else:
                await socket.close(1008, "a key is needed")

        return [WebSocketRoute(path, talk) for path in (route.path, *route.paths)]

    async def answer(request: Request) -> Response:
        if not route.open and not allowed(request.headers, service.settings.keys):
            raise Problem(
                "this server needs a key: Authorization: Bearer KEY", 401, code="invalid_api_key"
            )
        found: Awaitable[Response] = handle(service, request)
        return await found

    return [Path(path, answer, methods=list(route.methods)) for path in (route.path, *route.paths)]


async def refused(request: Request, error: Refusal) -> Response:
    """A mistake of the request, or a state of the server (busy, stopping)."""
    told = problem(error)
    later = error.retry_after if isinstance(error, Busy) else LATER
    headers = {"retry-after": str(later)} if told.code == "busy" else None
    if told.status == 401:
        headers = {"www-authenticate": "Bearer"}
    return json_response(document(told, request.url.path), told.status, headers)


async def not_here(request: Request, error: HTTPException) -> Response:
    """Unknown path, or wrong method."""
    where = f"{request.method} {request.url.path[:200]}"
    if error.status_code == 405:
        allow = (error.headers or {}).get("Allow", "")
        told = Problem(f"{where}: this path takes {allow}", 405)
    elif error.status_code == 404:
        told = Problem(f"{where}: there is nothing here", 404, code="not_found")
    else:
        told = Problem(error.detail, error.status_code, type="invalid_request_error")
    return json_response(document(told, request.url.path), told.status, dict(error.headers or {}))


async def broken(request: Request, error: Exception) -> Response:
    """A bug of ours: starlette raises it again behind this, so that its traceback goes to stderr."""
    told = Problem("the server made a mistake; its log says which", 500)
    return json_response(document(told, request.url.path), told.status)


async def gone(request: Request, error: Gone) -> Response:
    """The client has gone: nobody reads this."""
    return Response(status_code=NOBODY)
