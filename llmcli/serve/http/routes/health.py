"""`/health`: whether the server accepts requests and makes progress."""

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from llmcli.api.errors import ApiError
from llmcli.serve.http.exchange import json_response
from llmcli.serve.http.service import Route, Service


async def show_health(service: Service, request: Request) -> Response:
    """Respond with status 200, or with 503 while the server is stopping. The response also has the
    number of unfinished answers and the age of the last token, so that a router can avoid a server
    that no longer makes progress.
    """
    bridge = service.bridge
    age = bridge.metrics.last_token_age
    fields: dict[str, Any] = {
        "open": bridge.n_open,
        "last_token_age_ms": None if age is None else round(age * 1e3),
    }
    if bridge.is_stopping:
        raise ApiError("the server is stopping", 503, **fields)
    return json_response({"status": "ok", **fields})


ROUTES = (Route("/health", show_health, further_paths=("/v1/health",), is_public=True),)
