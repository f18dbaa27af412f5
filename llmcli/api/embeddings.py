"""Parses requests to `/v1/embeddings` and builds their responses, in OpenAI's format."""

import base64
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from llmcli.api.errors import ApiError, context_length_error, unknown_model
from llmcli.api.fields import Fields, json_type
from llmcli.api.server_settings import ServerSettings
from llmcli.runtime.binding.pooled_context import Vector
from llmcli.runtime.scoring.embedder import Embedder, normalize

EmbeddingInput = str | Sequence[int]


# OpenAI's limits for one request
MAX_TEXTS = 2048
MAX_TOKENS = 300_000


class EmbeddingsRequest:
    """The fields of one request to `/v1/embeddings`. Raises ApiError for an invalid field."""

    def __init__(self, document: Mapping[str, Any], settings: ServerSettings) -> None:
        self._fields = Fields(document)
        self.model = self._fields.text("model") or settings.model_name
        if self.model not in settings.names:
            raise unknown_model(self.model, settings.names)
        self._encoding = self._fields.choice("encoding_format", ("float", "base64"), "float")
        self.texts = read_texts(self._fields)

    def vector_length(self, embedder: Embedder) -> int:
        """Return the number of values in each returned vector: the field `dimensions`, or the
        model's embedding size without that field. Raises ApiError if `dimensions` is invalid or if
        the model is a reranker, which has no embeddings.
        """
        if embedder.is_reranker:
            raise ApiError(
                "this model ranks pairs of texts and has no embeddings: use /v1/rerank",
                501,
            )
        return (
            self._fields.integer("dimensions", 1, embedder.vector_size, embedder.vector_size)
            or embedder.vector_size
        )

    def build_document(
        self, ids: list[list[int]], vectors: Sequence[Vector], length: int
    ) -> dict[str, Any]:
        """Return the response as a JSON object in OpenAI's format. `ids`: the token ids of each
        text, which are only counted. `vectors`: shaped `[texts, embedding_size]`. `length`: the
        number of leading values to return of each vector.
        """
        data = [
            {
                "object": "embedding",
                "index": index,
                "embedding": encode_vector(shorten_vector(vector, length), self._encoding),
            }
            for index, vector in enumerate(vectors)
        ]
        count = sum(map(len, ids))
        usage = {"prompt_tokens": count, "total_tokens": count}
        return {"object": "list", "data": data, "model": self.model, "usage": usage}


def read_texts(fields: Fields) -> list[EmbeddingInput]:
    """Return the field `input` as a list with one entry for each text to embed. An entry is a text
    or a list of token ids. In the request, `input` is one such entry or a list of them. Raises
    ApiError for any other value.
    """
    values = fields.values.get("input")
    if values is None:
        raise ApiError("input is missing", param="input")
    if isinstance(values, str) or (
        isinstance(values, list) and values and all(type(id_) is int for id_ in values)
    ):
        values = [values]
    if not isinstance(values, list) or not values:
        raise ApiError(
            f"input must be text, texts or token ids, not {json_type(values)}", param="input"
        )
    if len(values) > MAX_TEXTS:
        raise ApiError(
            f"input has {len(values):,} texts; the limit is {MAX_TEXTS:,}", param="input"
        )
    for index, text in enumerate(values):
        if not isinstance(text, str) and not (
            isinstance(text, list) and all(type(token) is int for token in text)
        ):
            raise ApiError(
                f"input[{index}] must be text or token ids, not {json_type(text)}",
                param=f"input[{index}]",
            )
        if not text:
            raise ApiError(f"input[{index}] is empty", param=f"input[{index}]")
    return values


def encode_texts(texts: list[EmbeddingInput], embedder: Embedder) -> list[list[int]]:
    """Return the token ids of each text. An entry that already is a list of token ids is only
    checked.

    Raises ApiError for a text without tokens, an id that the model does not have, or too many
    tokens. A text is first refused by the smallest number of tokens that it can have, because
    tokenizing megabytes of spaces would take many seconds.
    """
    tokens: list[list[int]] = []
    for index, text in enumerate(texts):
        if (
            isinstance(text, str)
            and (min_tokens := embedder.min_tokens(text)) > embedder.max_tokens
        ):
            raise _too_long(index, f"{min_tokens} tokens or more", min_tokens, embedder)
        ids = embedder.encode(text) if isinstance(text, str) else list(text)
        if not ids:
            raise ApiError(f"input[{index}] has no tokens", param=f"input[{index}]")
        if unknown := next((token for token in ids if not 0 <= token < embedder.n_vocab), None):
            raise ApiError(
                f"input[{index}]: {unknown} is not a token of this model", param=f"input[{index}]"
            )
        tokens.append(ids)
        if len(ids) > embedder.max_tokens:
            raise _too_long(index, f"{len(ids)} tokens", len(ids), embedder)
    if (count := sum(map(len, tokens))) > MAX_TOKENS:
        raise ApiError(f"input has {count:,} tokens; the limit is {MAX_TOKENS:,}", param="input")
    return tokens


def _too_long(index: int, words: str, count: int, embedder: Embedder) -> ApiError:
    message = f"input[{index}] has {words}; this model embeds at most {embedder.max_tokens}"
    return context_length_error(message, count, embedder.max_tokens, param=f"input[{index}]")


def shorten_vector(vector: Vector, size: int) -> Vector:
    """Return the first `size` values of a vector, scaled to Euclidean length 1. OpenAI's
    `dimensions` does the same; it is meant for models that were trained for it (Matryoshka
    embeddings). Shapes: `[embedding_size]` to `[size]`.
    """
    return vector if size == len(vector) else normalize(vector[:size])


def encode_vector(vector: Vector, encoding: str) -> list[float] | str:
    """Return a vector for the JSON response: a list of numbers if `encoding` is "float", or the
    base64 text of its little-endian float32 bytes if `encoding` is "base64".
    """
    if encoding == "float":
        values: list[float] = vector.tolist()
        return values
    return base64.b64encode(np.ascontiguousarray(vector, "<f4").tobytes()).decode()
