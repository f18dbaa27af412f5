"""Parses requests for embeddings and builds their responses, in OpenAI's format or in that of
llama-server's `/embedding`.
"""

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import numpy as np

from llmcli.api.bodies.base import (
    MaxEntries,
    RequestBody,
    WholeNumber,
    honored,
    ignored,
    refused,
)
from llmcli.api.bodies.checks import read_body, wrong_value
from llmcli.api.conversation.messages import ContentPart, join_parts
from llmcli.api.errors import ApiError, context_length_error
from llmcli.api.request_settings import MAX_SHORTENED_CHARACTERS
from llmcli.api.server_settings import ServerSettings
from llmcli.api.tokens import PromptObject
from llmcli.runtime.binding.contexts.pooled_context import Vector
from llmcli.runtime.scoring.embedder import EUCLIDEAN, NO_NORM, Embedder, normalize

# A text, token ids, a list of both, or an object with the text of a prompt.
EmbeddingInput = str | Sequence[int | str] | Mapping[str, Any]
INPUT_WORDS = "text, token ids, or a list of both"
PATH = "/v1/embeddings"
# OpenAI's limits for one request
MAX_TEXTS = 2048
MAX_TOKENS = 300_000
# Numbers in one response with a vector for each token. In JSON they take twenty times the bytes.
MAX_TOKEN_VALUES = 1 << 22
MIN_NORM, MAX_NORM = NO_NORM, 100


class EmbeddingsBody(RequestBody):
    """A request for embeddings."""

    origin: ClassVar[str] = "OpenAI"
    model: str | None = honored("any name; the answer names the model that is served")
    input: Any = honored(f"{INPUT_WORDS}, an object with content, or a list of these")
    encoding_format: Literal["float", "base64"] | None = honored("how a vector is written")
    dimensions: int | None = honored("the number of values of a vector")
    user: Any = ignored("nothing is stored about users")


class LlamaServerEmbeddingsBody(EmbeddingsBody):
    """A request for embeddings, with the fields of llama-server."""

    origin: ClassVar[str] = "llama-server"
    content: Any = honored("the same as input")
    embd_normalize: Annotated[int, WholeNumber(MIN_NORM, MAX_NORM)] | None = honored(
        "how vectors are scaled: 2 to length 1, -1 not at all"
    )


class FullEmbeddingsBody(LlamaServerEmbeddingsBody):
    """A request for embeddings, with the fields of vLLM."""

    origin: ClassVar[str] = "vLLM"
    truncate_prompt_tokens: Annotated[int, WholeNumber(-1, 2**31 - 1)] | None = honored(
        "shorten a text to this many tokens; -1: to the most that the model embeds"
    )
    truncation_side: Literal["left", "right"] | None = honored(
        "which end of a text truncate_prompt_tokens cuts off: right (default) or left"
    )
    add_special_tokens: bool | None = refused("texts have the special tokens of the file", True)
    embed_dtype: Any = refused("vectors have the type float32", "float32")
    endianness: Any = refused("base64 is little-endian", "native", "little")
    use_activation: Any = refused("embd_normalize decides how vectors are scaled")
    padding: Any = ignored("texts need no padding")
    priority: Any = ignored("texts are embedded in the order of their requests")
    request_id: Any = ignored("an answer has no id")
    cache_salt: Any = ignored("embeddings are not cached")
    mm_processor_kwargs: Any = ignored("there are no images")
    media_io_kwargs: Any = ignored("there are no images")
    messages: Any = refused("send the texts as input")
    add_generation_prompt: Any = ignored("it belongs to messages, which is refused")
    continue_final_message: Any = ignored("it belongs to messages, which is refused")
    chat_template: Any = refused("texts are embedded as they are")
    chat_template_kwargs: Any = ignored("it belongs to messages, which is refused")


class TextObject(PromptObject):
    """A text to embed as an object."""

    content: Annotated[list[ContentPart], MaxEntries(MAX_TEXTS)] | None = honored(
        "the parts of the text, without prompt_string"
    )


class EmbeddingsRequest:
    """One request for embeddings. Raises ApiError for an invalid field.

    `texts`: the entries to embed. `norm`: how vectors are scaled (see normalize in
    runtime/scoring/embedder.py). `shortening`: how long texts are shortened; None: not at all.
    """

    def __init__(self, document: Mapping[str, Any], settings: ServerSettings) -> None:
        self._notes: list[str] = []
        self._body = body = read_body(FullEmbeddingsBody, document, self._notes, PATH)
        self.model = settings.find_name(body.model)
        self._encoding = body.encoding_format or "float"
        self.norm = EUCLIDEAN if body.embd_normalize is None else body.embd_normalize
        self.texts = read_texts(body)
        self.shortening: Shortening | None = None
        if body.truncate_prompt_tokens is not None:
            count = body.truncate_prompt_tokens
            if count == 0:
                raise ApiError(
                    "truncate_prompt_tokens is 0, which leaves no text",
                    param="truncate_prompt_tokens",
                )
            self.shortening = Shortening(
                None if count == -1 else count, body.truncation_side == "left"
            )

    def vector_length(self, embedder: Embedder) -> int:
        """Return the number of values in each returned vector: the field `dimensions`, or the
        model's embedding size without that field. Raises ApiError if `dimensions` is invalid or if
        the model is a reranker, which has no embeddings.
        """
        size, largest = self._body.dimensions, embedder.vector_size
        if embedder.gives_token_vectors and size is not None:
            raise ApiError("--pooling none gives vectors of tokens: leave out dimensions", 400)
        if embedder.is_reranker:
            raise ApiError(
                "this model ranks pairs of texts and has no embeddings: use /v1/rerank",
                501,
            )
        if size is not None and not 1 <= size <= largest:
            raise wrong_value("dimensions", size, f"a whole number from 1 to {largest}")
        return size or largest

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
        notes = {"notes": self._notes} if self._notes else {}
        return {"object": "list", "data": data, "model": self.model, "usage": usage, **notes}

    def build_list(self, vectors: Sequence[Vector], length: int) -> list[dict[str, Any]]:
        """Return the response in the format of llama-server's `/embedding`: a list with an object
        for each text, whose `embedding` is a list of vectors. `vectors`: for each text its vector,
        or the vectors of its tokens `[tokens, embedding_size]`.
        """
        return [
            {
                "index": index,
                "embedding": [
                    encode_vector(shorten_vector(row, length), "float")
                    for row in (vector if vector.ndim > 1 else [vector])
                ],
            }
            for index, vector in enumerate(vectors)
        ]


def read_texts(body: LlamaServerEmbeddingsBody) -> list[EmbeddingInput]:
    """Return the field `input`, or `content` as llama-server's clients call it, as a list with one
    entry for each text to embed. An entry is a text, a list of token ids and texts, or an object
    with a `prompt_string` or with `content`, a list of text parts. In the request, `input` is one
    such entry or a list of them. Raises ApiError for any other value.
    """
    name = "content" if body.input is None and body.content is not None else "input"
    values = getattr(body, name)
    if values is None:
        raise ApiError("input is missing", param="input")
    is_tokens = isinstance(values, list) and any(type(entry) is int for entry in values)
    if isinstance(values, str | dict) or is_tokens:
        values = [values]
    if values == []:
        raise ApiError(f"{name} is an empty list: give at least one text", param=name)
    if not isinstance(values, list):
        raise wrong_value(name, values, INPUT_WORDS)
    if len(values) > MAX_TEXTS:
        raise ApiError(f"{name} has {len(values):,} texts; the limit is {MAX_TEXTS:,}", param=name)
    return [_read_text(value, f"{name}[{index}]") for index, value in enumerate(values)]


def _read_text(value: Any, path: str) -> EmbeddingInput:
    """Return one entry of the field `input`, with objects replaced by their text. `path`: where it
    is in the request.
    """
    if isinstance(value, str):
        return value
    if isinstance(value, dict):
        return _read_object(value, path)
    if not isinstance(value, list) or not all(type(part) in (int, str) for part in value):
        raise wrong_value(path, value, INPUT_WORDS)
    if not value:
        raise ApiError(f"{path} is empty", param=path)
    return value


def _read_object(value: dict[str, Any], path: str) -> str:
    """Return the text of an entry that is an object. Raises ApiError for images and other media."""
    body = read_body(TextObject, value, [], PATH, path)
    if body.prompt_string is not None:
        return body.prompt_string
    path = f"{path}.content"
    if not body.content:
        raise ApiError(f"{path} is missing: a list of text parts", param=path)
    return join_parts(body.content, path, None, separator="")


@dataclass(frozen=True, slots=True)
class Shortening:
    """How a text is shortened that is too long. `tokens`: its largest number of tokens; None: the
    most that the model embeds. `keeps_end`: the beginning is cut off instead of the end.
    """

    tokens: int | None = None
    keeps_end: bool = False

    def shorten(self, ids: list[int], embedder: Embedder) -> list[int]:
        """Return the tokens that remain. The special tokens around a text remain, too."""
        limit = min(embedder.max_tokens, self.tokens or embedder.max_tokens)
        if len(ids) <= limit:
            return ids
        special = embedder.encode("")
        n_before = 1 if special and ids[0] == special[0] else 0
        n_after = 1 if len(special) > n_before and ids[-1] == special[-1] else 0
        n_free = max(0, limit - n_before - n_after)
        inner = ids[n_before : len(ids) - n_after]
        kept = inner[len(inner) - n_free :] if self.keeps_end else inner[:n_free]
        return [*ids[:n_before], *kept, *ids[len(ids) - n_after :]]


def encode_texts(
    texts: list[EmbeddingInput], embedder: Embedder, shortening: Shortening | None = None
) -> list[list[int]]:
    """Return the token ids of each text. Raises ApiError as `encode_text` does, and for too many
    tokens of all texts together.
    """
    tokens = [
        encode_text(text, embedder, shortening, f"input[{index}]")
        for index, text in enumerate(texts)
    ]
    limit = MAX_TOKENS
    if embedder.gives_token_vectors:
        limit = min(limit, MAX_TOKEN_VALUES // embedder.vector_size)
    if (count := sum(map(len, tokens))) > limit:
        raise ApiError(f"input has {count:,} tokens; the limit is {limit:,}", param="input")
    return tokens


def encode_text(
    text: EmbeddingInput, embedder: Embedder, shortening: Shortening | None, path: str
) -> list[int]:
    """Return the token ids of one text. A list of token ids is only checked. In a list of token ids
    and texts, only a text at its beginning gets the special tokens that the file asks for, as in
    llama-server. `path`: the text's name in messages.

    Raises ApiError for a text without tokens, an id that the model does not have, or too many
    tokens without a `shortening`. A text is first refused by the smallest number of tokens that it
    can have, because tokenizing megabytes of spaces would take many seconds.
    """
    parts = [text] if isinstance(text, str) else list(text)
    min_tokens = embedder.min_tokens(*(part for part in parts if isinstance(part, str)))
    n_characters = sum(len(part) for part in parts if isinstance(part, str))
    can_shorten = shortening is not None and n_characters <= MAX_SHORTENED_CHARACTERS
    if min_tokens > embedder.max_tokens and not can_shorten:
        raise _too_long(path, f"{min_tokens} tokens or more", min_tokens, embedder)
    ids: list[int] = []
    for number, part in enumerate(parts):
        if isinstance(part, str):
            ids += embedder.encode(part, add_special=not number)
        else:
            ids.append(part)
    if not ids:
        raise ApiError(f"{path} has no tokens", param=path)
    if unknown := next((token for token in ids if not 0 <= token < embedder.n_vocab), None):
        raise ApiError(f"{path}: {unknown} is not a token of this model", param=path)
    if shortening is not None:
        ids = shortening.shorten(ids, embedder)
    if len(ids) > embedder.max_tokens:
        raise _too_long(path, f"{len(ids)} tokens", len(ids), embedder)
    return ids


def refuse_token_vectors(embedder: Embedder) -> None:
    """Raise ApiError if the model gives a vector for each token, for which OpenAI has no format."""
    if embedder.gives_token_vectors:
        raise ApiError("--pooling none has no format here: use /embedding, or another --pooling")


def _too_long(path: str, words: str, count: int, embedder: Embedder) -> ApiError:
    message = (
        f"{path} is too large: it has {words}; this model embeds at most {embedder.max_tokens}"
    )
    return context_length_error(message, count, embedder.max_tokens, param=path)


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
