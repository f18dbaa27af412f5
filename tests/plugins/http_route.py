"""`/v1/vocabulary`: the size of the model's vocabulary."""

from starlette.requests import Request
from starlette.responses import Response

from llmcli.serve.http.exchange import json_response
from llmcli.serve.http.service import Route, Service


async def vocabulary(service: Service, request: Request) -> Response:
    """Answer a request with the size of the vocabulary."""
    return json_response({"n_vocab": service.bridge.runner.model.n_vocab})


ROUTES = (Route("/v1/vocabulary", vocabulary),)
