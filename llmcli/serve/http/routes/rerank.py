"""`/v1/rerank`: ranks documents by how well they answer a query, best first, as in the APIs of Jina
and Cohere. If the request has `texts` instead of `documents`, the response has the format of
text-embeddings-inference.
"""

from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from llmcli.api.rerank import PATH, RerankBody, RerankRequest, encode_pairs, require_reranker
from llmcli.serve.http.api_keys import connected_client
from llmcli.serve.http.exchange import cancel_on_disconnect, json_response, read_body
from llmcli.serve.http.service import Route, Service


async def rerank(service: Service, request: Request) -> Response:
    """Respond with the ranking. If the client disconnects, the computation stops after the current
    batch.
    """
    document = await read_body(request, service.settings.max_body)
    client = connected_client(request, service.settings.keys)
    return json_response(
        await cancel_on_disconnect(request.receive, answer_rerank(service, document, client))
    )


async def answer_rerank(service: Service, document: Mapping[str, Any], client: str) -> Any:
    """Return the response as JSON. `document`: the request's JSON object. `client`: the id of the
    client. Raises ApiError, ServerBusy or ServerStopping.
    """
    request = RerankRequest(document, service.settings)
    embedder = await service.embedding_queue.embedder()
    require_reranker(embedder, "start the server with --pooling rank")
    ids = await service.bridge.run_in_worker(
        encode_pairs, embedder, request.query, request.texts, kind="texts"
    )
    return request.build_document(ids, await service.embedding_queue.embed(ids, client))


ROUTES = (
    Route(
        PATH,
        rerank,
        ("POST",),
        ("/rerank", "/v1/reranking", "/reranking"),
        body_type=RerankBody,
    ),
)
