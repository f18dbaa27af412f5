"""The front server of several models. It answers requests about the models itself, and forwards
every other request to the model that the request names.

It checks keys and origins before it looks at a request, because a request may load a model.
"""

from typing import Any

from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from llmcli.api.errors import ApiError
from llmcli.api.server_settings import ServerSettings
from llmcli.serve.batches.worker import BatchWorker
from llmcli.serve.http.access import check_access
from llmcli.serve.http.app import make_routed_app
from llmcli.serve.http.body_budget import BodyBudgetMiddleware
from llmcli.serve.http.cors import with_cors
from llmcli.serve.http.exchange import ClientDisconnected
from llmcli.serve.http.origin_guard import OriginGuard
from llmcli.serve.http.request_ids import RequestIdMiddleware
from llmcli.serve.http.routes import batches, files
from llmcli.serve.http.routes.answer_control import CONTROL_PATHS
from llmcli.serve.http.routes.files import STREAMED_PATHS
from llmcli.serve.http.service import Service
from llmcli.serve.processes.front import FrontServer, error_response
from llmcli.serve.processes.models.model_pool import ModelPool
from llmcli.serve.processes.models.model_routes import ModelRoutes, find_route
from llmcli.serve.processes.models.pooled_lines import PooledLines

FILE_ROUTES = (*files.ROUTES, *batches.ROUTES)


class ModelsFront(FrontServer):
    """The ASGI application of a server of several models. `pool`: the models."""

    def __init__(self, pool: ModelPool, settings: ServerSettings) -> None:
        super().__init__(pool, settings)
        self.routes = ModelRoutes(pool, settings)
        self.batches = BatchWorker(PooledLines(pool, settings), settings)
        no_engine: Any = None  # the routes of files and batches use none
        service = Service(no_engine, settings, no_engine, self.body_budget, self.batches)
        self._files_app = make_routed_app(service, FILE_ROUTES)
        app: Any = with_cors(self._answer_allowed, settings)
        app = BodyBudgetMiddleware(app, self.body_budget, STREAMED_PATHS)
        self._bodies: Any = RequestIdMiddleware(OriginGuard(app, settings))

    async def _read_key(self, raw: bytes) -> bytes:
        """Return b"", because each model has one process."""
        return b""

    async def _forward(self, scope: dict[str, Any], raw: bytes, send: Send) -> None:
        """Send a request to the model that it names; that of a WebSocket to end the thinking of an
        answer names none. Raises ApiError if no response has begun.
        """
        if scope["path"] in CONTROL_PATHS:
            response = await self.routes.control_answer(scope, raw)
            await response(scope, _receive_nothing, send)
        else:
            await super()._forward(scope, raw, send)

    async def _answer_allowed(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request whose origin is allowed."""
        request = Request(scope, receive)
        try:
            route = find_route(scope["path"])
            check_access(route, request.headers, self.settings)
            if self.is_stopping:
                raise ApiError("the server is stopping", 503)
            is_file = route in FILE_ROUTES
            response = self._files_app if is_file else await self.routes.answer(request)
        except ClientDisconnected:
            return
        except ApiError as error:
            response = error_response(error, scope["path"])
        if response is None:
            await self._answer(scope, _replay(request, receive), send)
        else:
            await response(scope, receive, send)


async def _receive_nothing() -> Any:
    """Raise an error, because a response that is complete reads nothing."""
    raise NotImplementedError


def _replay(request: Request, receive: Receive) -> Receive:
    """Return a receive function for a request whose body may have been read already."""
    body = getattr(request.state, "body", None)
    if body is None:
        return receive
    unread = [{"type": "http.request", "body": body, "more_body": False}]

    async def replaying_receive() -> Any:
        return unread.pop() if unread else await receive()

    return replaying_receive
