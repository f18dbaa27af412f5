"""The ASGI application: its routes, the middleware in front of them (origin guard, memory limit,
CORS), the key check, and the error handlers.
"""

from collections.abc import Awaitable, Iterable, Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, WebSocketRoute
from starlette.routing import Route as Path

from llmcli.api.errors import ApiError, ServerBusy, as_api_error, error_document
from llmcli.api.server_settings import ServerSettings
from llmcli.serve.batches.engine_lines import EngineLines
from llmcli.serve.batches.worker import BatchWorker
from llmcli.serve.engine_thread.bridge import EngineBridge
from llmcli.serve.engine_thread.embedding_queue import EmbeddingQueue
from llmcli.serve.http.access import KEY_HEADERS, check_access
from llmcli.serve.http.api_keys import is_allowed
from llmcli.serve.http.body_budget import RETRY_AFTER_SECONDS, BodyBudget, BodyBudgetMiddleware
from llmcli.serve.http.cors import with_cors
from llmcli.serve.http.exchange import ClientDisconnected, json_response
from llmcli.serve.http.origin_guard import OriginGuard
from llmcli.serve.http.request_ids import RequestIdMiddleware
from llmcli.serve.http.routes import ROUTES
from llmcli.serve.http.routes.files import STREAMED_PATHS
from llmcli.serve.http.service import Route, Service
from quant.errors import UserError

CLIENT_CLOSED_STATUS = 499  # nginx's status for a closed connection; it is never sent


def make_app(bridge: EngineBridge, settings: ServerSettings) -> Starlette:
    """Return the application that answers requests with this bridge. Its `state.service` has the
    batches, which the caller starts and stops. The caller closes the bridge.
    """
    queue = EmbeddingQueue(bridge)
    batches = BatchWorker(EngineLines(bridge, queue, settings), settings)
    budget = BodyBudget(settings.max_body)
    service = Service(bridge, settings, queue, budget, batches, routes=ROUTES.values())
    middleware = [
        Middleware(RequestIdMiddleware),
        Middleware(OriginGuard, settings=settings),
        Middleware(BodyBudgetMiddleware, budget=service.body_budget, streamed_paths=STREAMED_PATHS),
        Middleware(with_cors, settings=settings),
    ]
    app = make_routed_app(service, ROUTES.values(), middleware)
    app.state.service = service
    return app


def make_routed_app(
    service: Service, routes: Iterable[Route], middleware: Sequence[Middleware] = ()
) -> Starlette:
    """Return an application of these routes, with the key check and the error handlers."""
    handlers: dict[Any, Any] = {
        UserError: respond_to_user_error,
        HTTPException: respond_to_http_error,
        ClientDisconnected: respond_to_disconnect,
        Exception: respond_to_bug,
    }
    return Starlette(
        routes=[path for route in routes for path in _paths(route, service)],
        middleware=list(middleware),
        exception_handlers=handlers,
    )


def _paths(route: Route, service: Service) -> list[BaseRoute]:
    """Return Starlette's routes for the paths of a route. Their handlers first check the API
    key.
    """
    handle: Any = route.handle
    if route.is_websocket:

        async def talk(socket: Any) -> None:
            if route.is_public or is_allowed(socket.headers, service.settings.keys):
                await handle(service, socket)
            else:
                await socket.close(1008, "this server needs a key")

        return [WebSocketRoute(path, talk) for path in (route.path, *route.further_paths)]

    async def answer(request: Request) -> Response:
        check_access(route, request.headers, service.settings)
        response: Awaitable[Response] = handle(service, request)
        return await response

    return [
        Path(path, answer, methods=list(route.methods))
        for path in (route.path, *route.further_paths)
    ]


async def respond_to_user_error(request: Request, error: UserError) -> Response:
    """Respond to an error that the request caused, or to a server that is busy or stopping."""
    api_error = as_api_error(error)
    retry_after = error.retry_after if isinstance(error, ServerBusy) else RETRY_AFTER_SECONDS
    headers = {"retry-after": str(retry_after)} if api_error.code == "busy" else None
    if api_error.status == 401:
        headers = KEY_HEADERS
    return json_response(error_document(api_error, request.url.path), api_error.status, headers)


async def respond_to_http_error(request: Request, error: HTTPException) -> Response:
    """Respond to Starlette's own errors: an unknown path or a wrong method."""
    request_line = f"{request.method} {request.url.path[:200]}"
    if error.status_code == 405:
        allow = (error.headers or {}).get("Allow", "")
        api_error = ApiError(f"{request_line}: this path accepts {allow}", 405)
    elif error.status_code == 404:
        api_error = ApiError(f"{request_line}: this path does not exist", 404, code="not_found")
    else:
        api_error = ApiError(error.detail, error.status_code, type="invalid_request_error")
    return json_response(
        error_document(api_error, request.url.path), api_error.status, dict(error.headers or {})
    )


async def respond_to_bug(request: Request, error: Exception) -> Response:
    """Respond with status 500 to an unexpected error. Starlette then raises the error again, so
    that its traceback is printed on stderr.
    """
    api_error = as_api_error(error)
    return json_response(error_document(api_error, request.url.path), api_error.status)


async def respond_to_disconnect(request: Request, error: ClientDisconnected) -> Response:
    """Return a response for a client that has disconnected. It is never sent, but Starlette needs
    one.
    """
    return Response(status_code=CLIENT_CLOSED_STATUS)
