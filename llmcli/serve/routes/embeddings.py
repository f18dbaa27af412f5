"""`/v1/embeddings`: texts or ids of their tokens to vectors, as OpenAI has it."""

import base64
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from llmcli.runtime.binding.pooled import Vector
from llmcli.runtime.embedder import Embedder, unit
from llmcli.serve.problems import Problem, unknown_model
from llmcli.serve.routes.base import Route, Service
from llmcli.serve.schema.fields import Fields, kind
from llmcli.serve.settings import Settings
from llmcli.serve.stream import body, json_response, unless_gone
from llmcli.serve.vectors import Text

MOST_TEXTS = 2048  # OpenAI's limits, of a request
MOST_TOKENS = 300_000


async def embeddings(service: Service, request: Request) -> Response:
    """Read the body, make the vectors, give up between two passes when the client goes."""
    found = await body(request, service.settings.max_body)
    return json_response(await unless_gone(request.receive, embedded(service, found)))


async def embedded(service: Service, found: Mapping[str, Any]) -> dict[str, Any]:
    """OpenAI's answer to a request's document; raises Problem, Busy, Stopping."""
    asked = Asked(found, service.settings)
    embedder = await service.vectors.embedder()
    cut = asked.length(embedder)
    ids = await service.bridge.prepare(encoded, asked.texts, embedder, kind="texts")
    return asked.answer(ids, await service.vectors.embed(ids), cut)


class Asked:
    """A request's document, read; raises Problem for what is wrong with it."""

    def __init__(self, found: Mapping[str, Any], settings: Settings) -> None:
        self._fields = Fields(found)
        self.model = self._fields.text("model") or settings.name
        if self.model not in settings.names:
            raise unknown_model(self.model, settings.names)
        self._form = self._fields.choice("encoding_format", ("float", "base64"), "float")
        self.texts = texts(self._fields)

    def length(self, embedder: Embedder) -> int:
        """How many numbers of each vector are wanted; raises Problem where there are none."""
        if embedder.ranks:
            raise Problem(
                "this model ranks pairs of texts: it gives no embeddings; /v1/rerank answers with it",
                501,
            )
        return self._fields.whole("dimensions", 1, embedder.size, embedder.size) or embedder.size

    def answer(self, ids: list[list[int]], vectors: Sequence[Vector], cut: int) -> dict[str, Any]:
        """OpenAI's document."""
        data = [
            {
                "object": "embedding",
                "index": index,
                "embedding": written(shortened(vector, cut), self._form),
            }
            for index, vector in enumerate(vectors)
        ]
        count = sum(map(len, ids))
        usage = {"prompt_tokens": count, "total_tokens": count}
        return {"object": "list", "data": data, "model": self.model, "usage": usage}


def texts(fields: Fields) -> list[Text]:
    """`input`: a text, texts, the ids of a text's tokens, or several such."""
    found = fields.values.get("input")
    if found is None:
        raise Problem("input is missing", param="input")
    if isinstance(found, str) or (
        isinstance(found, list) and found and all(type(one) is int for one in found)
    ):
        found = [found]
    if not isinstance(found, list) or not found:
        raise Problem(
            f"input must be text, texts or ids of tokens, not {kind(found)}", param="input"
        )
    if len(found) > MOST_TEXTS:
        raise Problem(
            f"input has {len(found):,} texts, at most {MOST_TEXTS:,} are taken", param="input"
        )
    for index, one in enumerate(found):
        if not isinstance(one, str) and not (
            isinstance(one, list) and all(type(part) is int for part in one)
        ):
            raise Problem(
                f"input[{index}] must be text or ids of tokens, not {kind(one)}",
                param=f"input[{index}]",
            )
        if not one:
            raise Problem(f"input[{index}] is empty", param=f"input[{index}]")
    return found


def encoded(given: list[Text], embedder: Embedder) -> list[list[int]]:
    """Each text as ids; raises Problem where there is none, one that the model does not know, or
    too many, at once where that is certain without making them: megabytes of spaces would keep the
    tokenizer from all others for long.
    """
    found: list[list[int]] = []
    for index, text in enumerate(given):
        if isinstance(text, str) and (least := embedder.least(text)) > embedder.most:
            raise _too_long(index, f"{least} tokens or more", least, embedder)
        ids = embedder.encode(text) if isinstance(text, str) else list(text)
        if not ids:
            raise Problem(f"input[{index}] has no tokens", param=f"input[{index}]")
        if bad := next((one for one in ids if not 0 <= one < embedder.n_vocab), None):
            raise Problem(f"input[{index}]: this model has no token {bad}", param=f"input[{index}]")
        found.append(ids)
        if len(ids) > embedder.most:
            raise _too_long(index, f"{len(ids)} tokens", len(ids), embedder)
    if (count := sum(map(len, found))) > MOST_TOKENS:
        raise Problem(
            f"input has {count:,} tokens, at most {MOST_TOKENS:,} are taken", param="input"
        )
    return found


def _too_long(index: int, words: str, count: int, embedder: Embedder) -> Problem:
    return Problem(
        f"input[{index}] has {words}, and this model embeds up to {embedder.most}",
        param=f"input[{index}]",
        code="context_length_exceeded",
        type="exceed_context_size_error",
        n_prompt_tokens=count,
        n_ctx=embedder.most,
    )


def shortened(vector: Vector, size: int) -> Vector:
    """The first numbers of a vector, of length 1 again: as OpenAI cuts the models that are made for
    it.
    """
    return vector if size == len(vector) else unit(vector[:size])


def written(vector: Vector, form: str) -> list[float] | str:
    """The numbers, or the bytes of float32 in base64."""
    if form == "float":
        numbers: list[float] = vector.tolist()
        return numbers
    return base64.b64encode(np.ascontiguousarray(vector, "<f4").tobytes()).decode()


ROUTES = (Route("/v1/embeddings", embeddings, ("POST",), ("/embeddings",)),)
