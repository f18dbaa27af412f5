"""`/health`: whether requests are taken, and how long ago the last token came."""

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from llmcli.serve.problems import Problem
from llmcli.serve.routes.base import Route, Service
from llmcli.serve.stream import json_response


async def health(service: Service, request: Request) -> Response:
    """ok, or 503 while the server stops. A router that finds answers open and an old token sends
    work elsewhere.
    """
    bridge = service.bridge
    age = bridge.meter.last_token_age
    about: dict[str, Any] = {
        "open": bridge.open,
        "last_token_age_ms": None if age is None else round(age * 1e3),
    }
    if bridge.stopping:
        raise Problem("the server is stopping", 503, **about)
    return json_response({"status": "ok", **about})


ROUTES = (Route("/health", health, paths=("/v1/health",), open=True),)
