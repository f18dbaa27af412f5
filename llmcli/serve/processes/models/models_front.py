"""The front server of several models: it answers what concerns the models itself, and forwards every
other request to the model that the request names.

It checks keys and origins before it looks at a request, because a request may load a model.
"""

from typing import Any

from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from llmcli.api.errors import ApiError, error_document
from llmcli.api.server_settings import ServerSettings
from llmcli.serve.http import api_keys
from llmcli.serve.http.body_budget import RETRY_AFTER_SECONDS, BodyBudgetMiddleware
from llmcli.serve.http.cors import with_cors
from llmcli.serve.http.exchange import ClientDisconnected, json_response
from llmcli.serve.http.origin_guard import OriginGuard
from llmcli.serve.http.request_ids import RequestIdMiddleware
from llmcli.serve.processes.front import FrontServer
from llmcli.serve.processes.models.model_pool import ModelPool
from llmcli.serve.processes.models.model_routes import PUBLIC_PATHS, ModelRoutes


class ModelsFront(FrontServer):
    """The ASGI application of a server of several models. `pool`: the models."""

    def __init__(self, pool: ModelPool, settings: ServerSettings) -> None:
        super().__init__(pool, settings)
        self.routes = ModelRoutes(pool, settings)
        self._disabled = dict(settings.disabled_paths)
        app: Any = with_cors(self._answer_allowed, settings)
        app = BodyBudgetMiddleware(app, self.body_budget)
        self._bodies: Any = RequestIdMiddleware(OriginGuard(app, settings))

    async def _read_key(self, raw: bytes) -> bytes:
        """Return b"", because each model has one process."""
        return b""

    async def _answer_allowed(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request whose origin is allowed."""
        request, path = Request(scope, receive), scope["path"]
        try:
            if option := self._disabled.get(path):
                raise ApiError(
                    f"this server does not offer {path}; start it with {option}",
                    404 if path == "/" else 501,
                )
            if path not in PUBLIC_PATHS and not api_keys.is_allowed(
                request.headers, self.settings.keys
            ):
                raise ApiError(
                    "this server needs a key: Authorization: Bearer KEY",
                    401,
                    code="invalid_api_key",
                )
            if self.is_stopping:
                raise ApiError("the server is stopping", 503)
            response = await self.routes.answer(request)
        except ClientDisconnected:
            return
        except ApiError as error:
            headers = (
                {"retry-after": str(RETRY_AFTER_SECONDS)} if error.status in (429, 503) else None
            )
            response = json_response(error_document(error, path), error.status, headers)
        if response is None:
            await self._answer(scope, _replay(request, receive), send)
        else:
            await response(scope, receive, send)


def _replay(request: Request, receive: Receive) -> Receive:
    """Return a receive function for a request whose body may have been read already."""
    body = getattr(request.state, "body", None)
    if body is None:
        return receive
    unread = [{"type": "http.request", "body": body, "more_body": False}]

    async def replaying_receive() -> Any:
        return unread.pop() if unread else await receive()

    return replaying_receive
