"""`/v1/embeddings`: vectors of texts or of token ids, in OpenAI's format. `/embedding` is the same in
llama-server's format, which also has room for a vector of each token (`--pooling none`).
"""

from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from llmcli.api.embeddings import (
    PATH,
    EmbeddingsRequest,
    FullEmbeddingsBody,
    encode_texts,
    refuse_token_vectors,
)
from llmcli.serve.http.api_keys import connected_client
from llmcli.serve.http.exchange import (
    cancel_on_disconnect,
    large_json_response,
    read_body,
)
from llmcli.serve.http.service import Route, Service

LIST_PATH = "/embedding"


async def embeddings(service: Service, request: Request) -> Response:
    """Respond with the embeddings of the texts in a request. If the client disconnects, the
    computation stops after the current batch.
    """
    document = await read_body(request, service.settings.max_body)
    client = connected_client(request, service.settings.keys)
    answer = answer_embeddings(service, document, client, request.url.path)
    return await large_json_response(await cancel_on_disconnect(request.receive, answer))


async def answer_embeddings(
    service: Service, document: Mapping[str, Any], client: str, path: str = PATH
) -> Any:
    """Return the response as JSON. `document`: the request's JSON object. `client`: the id of the
    client. `path`: the path, which decides the format. Raises ApiError, ServerBusy or
    ServerStopping.
    """
    request = EmbeddingsRequest(document, service.settings)
    embedder = await service.embedding_queue.embedder()
    length = request.vector_length(embedder)
    if path == PATH:
        refuse_token_vectors(embedder)
    ids = await service.bridge.run_in_worker(
        encode_texts, request.texts, embedder, request.shortening, kind="texts"
    )
    vectors = await service.embedding_queue.embed(ids, client, request.norm)
    if path == LIST_PATH or embedder.gives_token_vectors:
        return request.build_list(vectors, length)
    return request.build_document(ids, vectors, length)


ROUTES = (
    Route(
        PATH,
        embeddings,
        ("POST",),
        ("/embeddings", LIST_PATH),
        body_type=FullEmbeddingsBody,
    ),
)
