"""`/v1/embeddings`: vectors of texts or of token ids, as in OpenAI's API."""

from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from llmcli.api.embeddings import Asked, encoded
from llmcli.serve.http.exchange import body, json_response, unless_gone
from llmcli.serve.http.service import Route, Service


async def embeddings(service: Service, request: Request) -> Response:
    """Respond with the embeddings of a request; stop between two passes if the client
    disconnects.
    """
    document = await body(request, service.settings.max_body)
    return json_response(await unless_gone(request.receive, embedded(service, document)))


async def embedded(service: Service, document: Mapping[str, Any]) -> dict[str, Any]:
    """Return OpenAI's answer to a request's document. Raises ApiError, ServerBusy or
    ServerStopping.
    """
    request = Asked(document, service.settings)
    embedder = await service.vectors.embedder()
    length = request.length(embedder)
    ids = await service.bridge.prepare(encoded, request.texts, embedder, kind="texts")
    return request.answer(ids, await service.vectors.embed(ids), length)


ROUTES = (Route("/v1/embeddings", embeddings, ("POST",), ("/embeddings",)),)
