"""`/v1/rerank`: ranks documents by how well they answer a query, best first, as in the APIs of Jina
and Cohere.

The model must be a reranker: a model whose head scores a pair of texts. A score is the output of
the head (a logit, or a probability if the model file says so), as in llama-server; only the order
of scores is meaningful. If the request has `texts` instead of `documents`, the response has the
format of text-embeddings-inference.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from starlette.requests import Request
from starlette.responses import Response

from llmcli.api.bodies.base import (
    Either,
    MaxEntries,
    RequestBody,
    WholeNumber,
    honored,
    ignored,
    refused,
)
from llmcli.api.bodies.checks import read_body as check_body
from llmcli.api.embeddings import MAX_TOKENS
from llmcli.api.errors import ApiError, context_length_error
from llmcli.runtime.scoring.embedder import Embedder
from llmcli.serve.http.api_keys import connected_client
from llmcli.serve.http.exchange import cancel_on_disconnect, json_response, read_body
from llmcli.serve.http.service import Route, Service

PATH = "/v1/rerank"
MAX_DOCUMENTS = 1000  # Cohere's limit


class RerankDocument(RequestBody):
    """A document as an object."""

    origin: ClassVar[str] = "Jina, Cohere"
    reports_unknown: ClassVar[bool] = False
    text: str = honored("the text", ...)


Documents = Annotated[
    list[Annotated[str | RerankDocument, Either("text, or an object with text")]],
    MaxEntries(MAX_DOCUMENTS),
]


class RerankBody(RequestBody):
    """A query, and documents to rank by it."""

    origin: ClassVar[str] = "Jina, Cohere, llama-server"
    model: str | None = honored("any name; the answer names the model that is served")
    query: str = honored("the query", ...)
    documents: Documents | None = honored("the documents: texts, or objects with text")
    texts: Documents | None = honored(
        "the same; the answer has the format of text-embeddings-inference"
    )
    top_n: Annotated[int, WholeNumber(1, MAX_DOCUMENTS)] | None = honored(
        "return only this many documents, the best"
    )
    return_documents: bool | None = honored("return the texts of documents")
    return_text: bool | None = honored("the same, with texts")
    rank_fields: Any = refused("send the text to rank")
    max_chunks_per_doc: Any = ignored("a document is ranked as a whole")
    max_tokens_per_doc: Any = refused("a document is never shortened")
    truncate: Any = refused("a document is never shortened")
    raw_scores: Any = ignored("scores are returned as the model computes them")
    user: Any = ignored("nothing is stored about users")


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
    notes: list[str] = []
    body = check_body(RerankBody, document, notes, PATH)
    model = service.settings.find_name(body.model)
    query, has_texts = body.query, body.texts is not None
    entries = body.texts if has_texts else body.documents
    if not entries:
        name = "texts" if has_texts else "documents"
        raise ApiError(f"{name} is missing: a list of texts is required", param=name)
    texts = [entry if isinstance(entry, str) else entry.text for entry in entries]
    n_results = body.top_n or len(texts)
    with_text = body.return_text if has_texts else body.return_documents
    embedder = await service.embedding_queue.embedder()
    if not embedder.is_reranker:
        raise ApiError(
            "this model does not rank: /v1/rerank needs a file with a head that scores pairs;"
            " if this file has one, start the server with --pooling rank",
            400,
        )
    ids = await service.bridge.run_in_worker(encode_pairs, embedder, query, texts, kind="texts")
    scores = [float(vector[0]) for vector in await service.embedding_queue.embed(ids, client)]
    order = sorted(range(len(texts)), key=lambda number: -scores[number])[:n_results]
    if has_texts:
        return [
            {
                "index": index,
                "score": scores[index],
                **({"text": texts[index]} if with_text else {}),
            }
            for index in order
        ]
    results = [
        {
            "index": index,
            "relevance_score": scores[index],
            **({"document": {"text": texts[index]}} if with_text else {}),
        }
        for index in order
    ]
    count = sum(map(len, ids))
    usage = {"prompt_tokens": count, "total_tokens": count}
    extra = {"notes": notes} if notes else {}
    return {"object": "list", "model": model, "results": results, "usage": usage, **extra}


def encode_pairs(embedder: Embedder, query: str, texts: list[str]) -> list[list[int]]:
    """Return the token ids of each pair of the query and a text. Raises ApiError for a pair that is
    too long, or for too many tokens in total.
    """
    tokens, count = [], 0
    for index, text in enumerate(texts):
        min_tokens = embedder.min_tokens(query, text)
        if (
            min_tokens > embedder.max_tokens
        ):  # too long even by the smallest possible number of tokens
            raise _too_long(index, f"{min_tokens} tokens or more", min_tokens, embedder)
        ids = embedder.encode_pair(query, text)
        if len(ids) > embedder.max_tokens:
            raise _too_long(index, f"{len(ids)} tokens", len(ids), embedder)
        tokens.append(ids)
        count += len(ids)
        # checked after every document, because each one tokenizes the query again
        if count > MAX_TOKENS:
            size = f"the query and the first {index + 1:,} documents have {count:,} tokens"
            raise ApiError(f"{size}; the limit is {MAX_TOKENS:,}", param="documents")
    return tokens


def _too_long(index: int, words: str, count: int, embedder: Embedder) -> ApiError:
    limit = embedder.max_tokens
    message = f"document {index} and the query have {words}; this model ranks at most {limit}"
    return context_length_error(message, count, limit)


ROUTES = (
    Route(
        PATH,
        rerank,
        ("POST",),
        ("/rerank", "/v1/reranking", "/reranking"),
        body_type=RerankBody,
    ),
)
