"""`/v1/rerank`: how well each of some documents answers a query, best first, as Jina and Cohere
have it.

For models with a head that scores pairs. A score is what the head gives (a logit, or a probability
where the file says so), as llama-server tells it: the order is what counts. With `texts` instead of
`documents` the answer has the form of text-embeddings-inference.
"""

from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from llmcli.runtime.embedder import Embedder
from llmcli.serve.problems import Problem, unknown_model
from llmcli.serve.routes.base import Route, Service
from llmcli.serve.routes.embeddings import MOST_TOKENS
from llmcli.serve.schema.fields import Fields, kind
from llmcli.serve.stream import body, json_response, unless_gone

MOST = 1000  # documents of a request, as Cohere has it


async def rerank(service: Service, request: Request) -> Response:
    """Read the body, score, give up between two passes when the client goes."""
    found = await body(request, service.settings.max_body)
    return json_response(await unless_gone(request.receive, ranked(service, found)))


async def ranked(service: Service, found: Mapping[str, Any]) -> Any:
    """The answer to a request's document; raises Problem, Busy, Stopping."""
    fields, settings = Fields(found), service.settings
    model = fields.text("model") or settings.name
    if model not in settings.names:
        raise unknown_model(model, settings.names)
    query, old = fields.needed("query"), fields.has("texts")
    texts = documents(fields, "texts" if old else "documents")
    most = fields.whole("top_n", 1, MOST, len(texts)) or len(texts)
    back = fields.flag("return_text" if old else "return_documents")
    embedder = await service.vectors.embedder()
    if not embedder.ranks:
        raise Problem(
            "this model does not rank: /v1/rerank is for files that score pairs (pooling_type rank)",
            400,
        )
    ids = await service.bridge.prepare(pairs, embedder, query, texts, kind="texts")
    scores = [float(vector[0]) for vector in await service.vectors.embed(ids)]
    order = sorted(range(len(texts)), key=lambda number: -scores[number])[:most]
    if old:
        return [
            {"index": at, "score": scores[at], **({"text": texts[at]} if back else {})}
            for at in order
        ]
    results = [
        {
            "index": at,
            "relevance_score": scores[at],
            **({"document": {"text": texts[at]}} if back else {}),
        }
        for at in order
    ]
    count = sum(map(len, ids))
    usage = {"prompt_tokens": count, "total_tokens": count}
    return {"object": "list", "model": model, "results": results, "usage": usage}


def documents(fields: Fields, name: str) -> list[str]:
    """The texts: plain, or objects with a `text`."""
    value = fields.list(name, MOST)
    if not value:
        raise Problem(f"{name} is missing: it takes a list of texts", param=name)
    for index, one in enumerate(value):
        if not isinstance(one.get("text") if isinstance(one, dict) else one, str):
            raise Problem(
                f"{name}[{index}] must be text, or an object with text, not {kind(one)}", param=name
            )
    return [one["text"] if isinstance(one, dict) else one for one in value]


def pairs(embedder: Embedder, query: str, texts: list[str]) -> list[list[int]]:
    """Each text with the query, as ids; raises Problem for one that is too long."""
    found, count = [], 0
    for index, text in enumerate(texts):
        if (
            least := embedder.least(query, text)
        ) > embedder.most:  # without making them, as of embeddings
            raise _too_long(index, f"{least} tokens or more", least, embedder)
        ids = embedder.pair(query, text)
        if len(ids) > embedder.most:
            raise _too_long(index, f"{len(ids)} tokens", len(ids), embedder)
        found.append(ids)
        count += len(ids)
        if (
            count > MOST_TOKENS
        ):  # asked as it grows: the query counts, and is cut into tokens, once for each document
            told = f"the query and the first {index + 1:,} documents have {count:,} tokens"
            raise Problem(f"{told}, at most {MOST_TOKENS:,} are taken", param="documents")
    return found


def _too_long(index: int, words: str, count: int, embedder: Embedder) -> Problem:
    return Problem(
        f"document {index} and the query have {words}, and this model ranks up to {embedder.most}",
        code="context_length_exceeded",
        type="exceed_context_size_error",
        n_prompt_tokens=count,
        n_ctx=embedder.most,
    )


ROUTES = (Route("/v1/rerank", rerank, ("POST",), ("/rerank", "/v1/reranking", "/reranking")),)
