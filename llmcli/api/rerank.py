"""Parses requests for a ranking and builds their responses, in the format of Jina and Cohere or in
that of text-embeddings-inference.

The model must be a reranker: a model whose head scores a pair of texts. A score is the output of
the head (a logit, or a probability if the model file says so), as in llama-server; only the order
of scores is meaningful.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

from llmcli.api.bodies.base import (
    Either,
    MaxEntries,
    RequestBody,
    WholeNumber,
    honored,
    ignored,
    refused,
)
from llmcli.api.bodies.checks import read_body
from llmcli.api.embeddings import MAX_TOKENS
from llmcli.api.errors import ApiError, context_length_error
from llmcli.api.server_settings import ServerSettings
from llmcli.runtime.binding.contexts.pooled_context import Vector
from llmcli.runtime.scoring.embedder import Embedder

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


class RerankRequest:
    """One request for a ranking. Raises ApiError for an invalid field.

    `query`: the query. `texts`: the documents to rank.
    """

    def __init__(self, document: Mapping[str, Any], settings: ServerSettings) -> None:
        self._notes: list[str] = []
        self._body = body = read_body(RerankBody, document, self._notes, PATH)
        self.model = settings.find_name(body.model)
        self.query, self._has_texts = body.query, body.texts is not None
        entries = body.texts if self._has_texts else body.documents
        if not entries:
            name = "texts" if self._has_texts else "documents"
            raise ApiError(f"{name} is missing: a list of texts is required", param=name)
        self.texts = [entry if isinstance(entry, str) else entry.text for entry in entries]

    def build_document(self, ids: Sequence[Sequence[int]], vectors: Sequence[Vector]) -> Any:
        """Return the response as JSON: the best documents, best first. `ids`: the token ids of each
        pair, which are only counted. `vectors`: of each pair, whose first value is its score.
        """
        scores = [read_score(vector) for vector in vectors]
        order = rank(scores)[: self._body.top_n or len(scores)]
        if self._has_texts:
            return [
                {
                    "index": index,
                    "score": scores[index],
                    **({"text": self.texts[index]} if self._body.return_text else {}),
                }
                for index in order
            ]
        results = [
            {
                "index": index,
                "relevance_score": scores[index],
                **(
                    {"document": {"text": self.texts[index]}} if self._body.return_documents else {}
                ),
            }
            for index in order
        ]
        count = sum(map(len, ids))
        usage = {"prompt_tokens": count, "total_tokens": count}
        extra = {"notes": self._notes} if self._notes else {}
        return {"object": "list", "model": self.model, "results": results, "usage": usage, **extra}


def read_score(vector: Vector) -> float:
    """Return the score in the result of a pair of texts."""
    return float(vector[0])


def rank(scores: Sequence[float]) -> list[int]:
    """Return the numbers of the documents with these scores, best first. Equal ones stay in
    order.
    """
    return sorted(range(len(scores)), key=lambda number: -scores[number])


def require_reranker(embedder: Embedder, hint: str) -> None:
    """Raise ApiError if the model does not rank. `hint`: how a user says that the file does."""
    if not embedder.is_reranker:
        raise ApiError(
            "this model does not rank: a ranking needs a file with a head that scores pairs;"
            f" if this file has one, {hint}",
            400,
        )


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
