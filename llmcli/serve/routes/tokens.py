"""`/tokenize` and `/detokenize`, as in llama-server."""

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from llmcli.runtime.binding.model import Model
from llmcli.serve.problems import Problem
from llmcli.serve.routes.base import Route, Service
from llmcli.serve.schema.fields import Fields
from llmcli.serve.stream import body, json_response

MOST_TEXT, MOST_PIECES = 1 << 21, 1 << 17


async def tokenize(service: Service, request: Request) -> Response:
    """Respond with the token ids of a text; with `with_pieces` also with the text of each token, or
    its bytes if it is not valid text.
    """
    fields = Fields(await body(request, service.settings.max_body))
    text, around = fields.text("content") or "", fields.flag("add_special")
    special, pieces = fields.flag("parse_special", True), fields.flag("with_pieces")
    model = service.bridge.runner.model
    tokens = await service.bridge.prepare(
        tokens_of, model, text, around, special, pieces, kind="texts"
    )
    return json_response({"tokens": tokens})


async def detokenize(service: Service, request: Request) -> Response:
    """Respond with the text of token ids."""
    fields = Fields(await body(request, service.settings.max_body))
    model = service.bridge.runner.model
    return json_response(
        {"content": await service.bridge.prepare(text_of, model, fields, kind="texts")}
    )


def tokens_of(model: Model, text: str, around: bool, special: bool, pieces: bool) -> list[Any]:
    """Return the token ids of a text, or ids with pieces. `add_special`: add the tokens that the
    file puts around a text; `parse_special`: parse control tokens.

    Raises ApiError for a text that is too long.
    """
    if len(text) > MOST_TEXT:
        raise Problem(
            f"content has {len(text):,} characters; the limit is {MOST_TEXT:,}",
            param="content",
        )
    ids = model.tokenize(text, special=special, add_special=around)
    if pieces and len(ids) > MOST_PIECES:
        raise Problem(
            f"content has {len(ids):,} tokens; the limit with pieces is {MOST_PIECES:,}",
            param="with_pieces",
        )
    return [{"id": id_, "piece": _piece(model, id_)} for id_ in ids] if pieces else ids


def _piece(model: Model, token: int) -> str | list[int]:
    raw = model.piece(token, special=True)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return list(raw)


def text_of(model: Model, fields: Fields) -> str:
    """Return the text of the field `tokens`. Raises ApiError for a value that is not a token of the
    model.
    """
    ids = fields.list("tokens")
    for index, id_ in enumerate(ids):
        if type(id_) is not int or not 0 <= id_ < model.n_vocab:
            raise Problem(f"tokens[{index}] is not a token of this model", param=f"tokens[{index}]")
    return b"".join(model.piece(id_, special=True) for id_ in ids).decode("utf-8", "replace")


ROUTES = (Route("/tokenize", tokenize, ("POST",)), Route("/detokenize", detokenize, ("POST",)))
