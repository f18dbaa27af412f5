"""`/v1/embeddings`: vectors of texts or of token ids, in OpenAI's format."""

from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from llmcli.api.embeddings import EmbeddingsRequest, encode_texts
from llmcli.serve.http.exchange import cancel_on_disconnect, json_response, read_body
from llmcli.serve.http.service import Route, Service


async def embeddings(service: Service, request: Request) -> Response:
    """Respond with the embeddings of the texts in a request. If the client disconnects, the
    computation stops after the current batch.
    """
    document = await read_body(request, service.settings.max_body)
    return json_response(
        await cancel_on_disconnect(request.receive, answer_embeddings(service, document))
    )


async def answer_embeddings(service: Service, document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the response as a JSON object in OpenAI's format. `document`: the request's JSON
    object. Raises ApiError, ServerBusy or ServerStopping.
    """
    request = EmbeddingsRequest(document, service.settings)
    embedder = await service.embedding_queue.embedder()
    length = request.vector_length(embedder)
    ids = await service.bridge.run_in_worker(encode_texts, request.texts, embedder, kind="texts")
    return request.build_document(ids, await service.embedding_queue.embed(ids), length)


ROUTES = (Route("/v1/embeddings", embeddings, ("POST",), ("/embeddings",)),)
