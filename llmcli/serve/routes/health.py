"""`/health`: whether requests are taken."""

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from llmcli.serve.problems import Problem
from llmcli.serve.routes.base import Route, Service


async def health(service: Service, request: Request) -> Response:
    """ok, or 503 while the server stops."""
    if service.bridge.stopping:
        raise Problem("the server is stopping", 503)
    return JSONResponse({"status": "ok"})


ROUTES = (Route("/health", health, paths=("/v1/health",), open=True),)
