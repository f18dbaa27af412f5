"""`/v1/rerank`: how well each document answers a query, best first, as in Jina's and Cohere's APIs.

For models with a head that scores pairs. A score is the head's output (a logit, or a probability if
the file says so), as in llama-server; only the order matters. With `texts` instead of `documents`
the answer has the form of text-embeddings-inference.
"""

from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from llmcli.api.embeddings import MOST_TOKENS
from llmcli.api.errors import Problem, unknown_model
from llmcli.api.fields import Fields, kind
from llmcli.runtime.scoring.embedder import Embedder
from llmcli.serve.http.exchange import body, json_response, unless_gone
from llmcli.serve.http.service import Route, Service

MOST = 1000  # documents of one request, Cohere's limit


async def rerank(service: Service, request: Request) -> Response:
    """Respond with the ranking of a request; stop between two passes if the client disconnects."""
    document = await body(request, service.settings.max_body)
    return json_response(await unless_gone(request.receive, ranked(service, document)))


async def ranked(service: Service, document: Mapping[str, Any]) -> Any:
    """Return the answer to a request's document. Raises ApiError, ServerBusy or ServerStopping."""
    fields, settings = Fields(document), service.settings
    model = fields.text("model") or settings.name
    if model not in settings.names:
        raise unknown_model(model, settings.names)
    query, has_texts = fields.needed("query"), fields.has("texts")
    texts = documents(fields, "texts" if has_texts else "documents")
    n_results = fields.whole("top_n", 1, MOST, len(texts)) or len(texts)
    with_text = fields.flag("return_text" if has_texts else "return_documents")
    embedder = await service.vectors.embedder()
    if not embedder.ranks:
        raise Problem(
            "this model does not rank: /v1/rerank needs a file that scores pairs"
            " (pooling_type rank)",
            400,
        )
    ids = await service.bridge.prepare(pairs, embedder, query, texts, kind="texts")
    scores = [float(vector[0]) for vector in await service.vectors.embed(ids)]
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
    return {"object": "list", "model": model, "results": results, "usage": usage}


def documents(fields: Fields, name: str) -> list[str]:
    """Return the documents: texts, or objects with a `text`. Raises ApiError."""
    value = fields.list(name, MOST)
    if not value:
        raise Problem(f"{name} is missing: a list of texts is required", param=name)
    for index, entry in enumerate(value):
        if not isinstance(entry.get("text") if isinstance(entry, dict) else entry, str):
            raise Problem(
                f"{name}[{index}] must be text, or an object with text, not {kind(entry)}",
                param=name,
            )
    return [entry["text"] if isinstance(entry, dict) else entry for entry in value]


def pairs(embedder: Embedder, query: str, texts: list[str]) -> list[list[int]]:
    """Return the token ids of each text together with the query. Raises ApiError for a pair that is
    too long.
    """
    tokens, count = [], 0
    for index, text in enumerate(texts):
        least = embedder.least(query, text)
        if least > embedder.most:  # certain without tokenizing, as in embeddings
            raise _too_long(index, f"{least} tokens or more", least, embedder)
        ids = embedder.pair(query, text)
        if len(ids) > embedder.most:
            raise _too_long(index, f"{len(ids)} tokens", len(ids), embedder)
        tokens.append(ids)
        count += len(ids)
        # Checked at every document, because the query is tokenized again for each.
        if count > MOST_TOKENS:
            size = f"the query and the first {index + 1:,} documents have {count:,} tokens"
            raise Problem(f"{size}; the limit is {MOST_TOKENS:,}", param="documents")
    return tokens


def _too_long(index: int, words: str, count: int, embedder: Embedder) -> Problem:
    return Problem(
        f"document {index} and the query have {words}; this model ranks at most {embedder.most}",
        code="context_length_exceeded",
        type="exceed_context_size_error",
        n_prompt_tokens=count,
        n_ctx=embedder.most,
    )


ROUTES = (Route("/v1/rerank", rerank, ("POST",), ("/rerank", "/v1/reranking", "/reranking")),)
